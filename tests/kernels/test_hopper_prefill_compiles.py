"""What the compiler makes of prefill attention by wgmma, with no GPU: no spills, no products one by one."""

import functools
import re

import pytest

pytest.importorskip("triton")

import triton
from hopper_compiler import assembler_notes, disassembled
from scalegate.kernels.hopper.packed_operand import x_layout
from scalegate.kernels.hopper.prefill import OPTIONS, hopper_prefill_kernel
from scalegate.kernels.hopper.prefill_items import Form, block_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

PLAIN = {"half": False, "window": False, "softcap": False}
EVERY = pytest.mark.parametrize(
    "dim, options", [(128, PLAIN), (64, {"half": True, "window": True, "softcap": True}), (256, PLAIN)]
)


@functools.cache
def compiled(dim: int, half: bool, window: bool, softcap: bool):
    kernel = hopper_prefill_kernel
    form = Form(32, 8, dim, 64, half, window, softcap)
    desc = f"tensordesc<{'fp16' if half else 'bf16'}[{form.box}, 64],{x_layout()!r}>"
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"q": "*bf16", "out": "*bf16"}
    signature |= dict.fromkeys(("block_table", "tiles"), "*i32") | {"key_desc": desc, "value_desc": desc}
    signature |= dict.fromkeys(("scale_log2", "softcap"), "fp32")
    options = ("key_scale", "value_scale", "sinks")
    signature |= dict.fromkeys(options, "*fp32")
    constants = {"T": form} | ({} if half else dict.fromkeys(options))
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    pointers = [places[name] for name, kind in signature.items() if kind[0] == "*"]
    source = GluonASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {place: [["tt.divisibility", 16]] for place in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


def loops_over_blocks(instructions: list[str]) -> list[list[str]]:
    """Those with two waits for products; each instruction takes 16 bytes."""
    loops = []
    for end, text in enumerate(instructions):
        branch = re.search(r"\bBRA (0x[0-9a-f]+)", text)
        loop = instructions[int(branch[1], 16) // 16 : end + 1] if branch else []
        if sum("WARPGROUP.DEPBAR" in one for one in loop) == 2 and any("BAR.ARV" in one for one in loop):
            loops.append(loop)
    return loops


@EVERY
def test_nothing_is_spilled_or_serialized_and_it_fits_an_sm(dim: int, options: dict, tmp_path):
    kernel = compiled(dim, **options)
    notes = assembler_notes(kernel, tmp_path)
    assert "0 bytes spill stores" in notes and "serialized" not in notes
    assert kernel.metadata.shared <= 227 * 1024


@EVERY
def test_two_probabilities_are_rounded_by_one_instruction(dim: int, options: dict, tmp_path):
    for loop in loops_over_blocks(disassembled(compiled(dim, **options), tmp_path)):
        assert sum("F2FP" in text for text in loop) == block_of(dim) // 4
        assert not any("PRMT" in text for text in loop)
