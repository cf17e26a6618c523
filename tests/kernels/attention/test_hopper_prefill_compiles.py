"""What the compiler makes of prefill attention by wgmma, with no GPU: no spills, no products one by one."""

import functools
import re
import struct

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.attention.e4m3_queries import LEAST
from scalegate.kernels.attention.hopper_prefill import E4M3_SLOTS, OPTIONS, hopper_prefill_kernel
from scalegate.kernels.attention.hopper_prefill_items import Form, block_of
from scalegate.kernels.hopper.packed_operand import x_layout
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import assembler_notes, disassembled, spilled
from scalegate.tests.kernels.triton_versions import bound
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

PLAIN = {"half": False, "window": False, "softcap": False, "e4m3": False}
E4M3 = PLAIN | {"half": True, "e4m3": True}
OPTIONAL = {"half": True, "window": True, "softcap": True}
EVERY = pytest.mark.parametrize(
    "dim, options",
    exhaustive_but(
        [
            (128, PLAIN),
            (64, OPTIONAL | {"e4m3": False}),
            (256, PLAIN),
            (128, E4M3),
            (64, OPTIONAL | {"e4m3": True}),
            (256, E4M3),
        ],
        (128, PLAIN),
        (128, E4M3),
    ),
)


@functools.cache
def compiled(dim: int, half: bool, window: bool, softcap: bool, e4m3: bool):
    kernel = hopper_prefill_kernel
    form = Form(32, 8, dim, 64, half, window, softcap, e4m3, E4M3_SLOTS if e4m3 else 2)
    values = "fp16" if half else "bf16"
    keys = "fp8e4nv" if e4m3 else values
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"q": "*bf16", "out": "*bf16"}
    signature |= dict.fromkeys(("key_table", "block_table", "tiles"), "*i32")
    signature |= {
        "key_desc": f"tensordesc<{keys}[{form.box}, {form.key_width}],{form.key_layout!r}>",
        "value_desc": f"tensordesc<{values}[{form.box}, 64],{x_layout()!r}>",
    }
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
        if sum("WARPGROUP.DEPBAR" in line for line in loop) == 2 and any("BAR.ARV" in line for line in loop):
            loops.append(loop)
    return loops


@EVERY
def test_nothing_is_spilled_or_serialized_and_it_fits_an_sm(dim: int, options: dict, tmp_path):
    kernel = compiled(dim, **options)
    notes = assembler_notes(kernel, tmp_path)
    assert spilled(notes) <= bound(0, 36, 72, 80) and "serialized" not in notes
    assert kernel.metadata.shared <= 227 * 1024


@EVERY
def test_two_probabilities_are_rounded_by_one_instruction(dim: int, options: dict, tmp_path):
    for loop in loops_over_blocks(disassembled(compiled(dim, **options), tmp_path)):
        assert sum("F2FP" in text for text in loop) == block_of(dim) // 4
        assert not any("PRMT" in text for text in loop)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_e4m3_keys_are_multiplied_as_such_and_take_half_the_bytes(dim: int):
    """By half as many products, with nothing added up outside of them."""
    wide, narrow = (compiled(dim, **(E4M3 | {"e4m3": e4m3})).asm["ptx"] for e4m3 in (False, True))
    block = block_of(dim)
    products = re.findall(r"wgmma\S*m64n(\d+)k(\d+)\.f32\.(\w+)\.", narrow)
    by_keys = [product for product in products if product[2] == "e4m3"]
    by_values = [product for product in products if product[2] == "f16"]
    assert set(by_keys) == {(str(block), "32", "e4m3")} and set(by_values) == {(str(dim), "16", "f16")}
    # Steps along the sum: dim of keys, block of values.
    assert len(by_keys) * 32 * block == len(by_values) * 16 * dim
    assert len(re.findall(r"wgmma\S*\.f32\.f16", wide)) == 2 * len(by_keys) + len(by_values)
    sizes = {width: [int(size) for size in re.findall(r"expect_tx[^;]*, (\d+);", ptx)]
             for width, ptx in (("wide", wide), ("narrow", narrow))}  # fmt: skip
    assert set(sizes["wide"]) == {2 * block * dim}
    assert set(sizes["narrow"]) == {block * dim, 2 * block * dim}
    assert narrow.count("add.f32") == wide.count("add.f32")


@EVERY
def test_a_row_of_zeros_has_a_scale_above_zero(dim: int, options: dict):
    """Or its hidden scores, minus infinity times that, would be no numbers."""
    ptx = compiled(dim, **options).asm["ptx"]
    least = struct.pack(">f", LEAST).hex().upper()
    assert bool(re.search(rf"max\.f32\s.*, 0f{least};", ptx)) == options["e4m3"]
    assert not re.search(r"(mul|fma|div)\S*\.ftz", ptx)
