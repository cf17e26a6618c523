"""The paged prefill kernel compiles for a GPU, without one: interpreters take what compilers refuse."""

import re

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.attention.prefill import MANY_ROWS, Form, _attend_tiles, program_sizes
from scalegate.tests.exhaustive import exhaustive_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*fp8e4nv": 1, "*i8": 1}
ARITHMETIC = ("fma.rn.f32", "mul.f32", "sub.f32", "add.f32", "neg.f32", "ex2.approx", "wgmma.mma_async")
SCALE_POINTERS = {0: None, 1: "*fp32", 2: "*fp32"}


@pytest.mark.parametrize(
    "pages, scales, window, count",
    exhaustive_but(
        [
            ("*bf16", 0, False, 4096),
            ("*bf16", 0, True, 4096),
            ("*bf16", 0, False, 256),
            ("*fp32", 0, False, 256),
            ("*fp8e4nv", 1, False, 256),
            ("*fp16", 1, False, 4096),
            ("*fp16", 2, False, 4096),
            ("*i8", 2, False, 256),
        ],
        ("*bf16", 0, False, 4096),
        ("*fp8e4nv", 1, False, 256),
    ),
)
def test_every_kind_of_page_compiles(pages: str, scales: int, window: bool, count: int):
    kernel = compiled(pages, count, scales=scales, window=window)
    assert "wgmma" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("pages", exhaustive_but(["*bf16", "*fp32"], "*bf16"))
def test_the_widest_heads_fit_into_shared_memory(pages: str):
    assert compiled(pages, 4096, head_dim=256).metadata.shared <= SHARED_MEMORY


def test_single_tokens_compile_by_the_same_program():
    assert "wgmma" in compiled("*bf16", 128, by_length=True).asm["ptx"]


def test_masked_blocks_and_single_tokens_are_computed_by_the_same_arithmetic():
    """A compiler that contracts a product and a sum in one loop and not in the other makes a token's bits
    follow where its tile begins, which was so once."""
    found = set()
    for count, by_length in ((4096, False), (256, False), (256, True)):
        ptx = compiled("*bf16", count, by_length=by_length).asm["ptx"]
        loops = [block for block in re.split(r"\n(?=\$L__BB)", ptx) if "ex2." in block]
        assert len(loops) == 2, "one for masked blocks, one for the others"
        found |= {tuple(loop.count(word) for word in ARITHMETIC) for loop in loops}
    assert len(found) == 1, found


def compiled(
    pages: str,
    count: int,
    *,
    scales: int = 0,
    window: bool = False,
    head_dim: int = 128,
    by_length: bool = False,
):
    activations = "*bf16" if scales else pages
    types = {
        **dict.fromkeys(["q_ptr", "out_ptr"], activations),
        **dict.fromkeys(["key_ptr", "value_ptr"], pages),
        **dict.fromkeys(["table_ptr", "tiles_ptr"], "*i32"),
        **dict.fromkeys(["key_scale_ptr", "value_scale_ptr"], SCALE_POINTERS[scales]),
        "sinks_ptr": None,
        **dict.fromkeys(["scale_log2", "softcap"], "fp32"),
        **dict.fromkeys(["window", "table_stride"], "i32"),
    }
    group = 4
    rows, block = program_sizes(count, head_dim, ITEMSIZE[activations], ITEMSIZE[pages])
    form = Form(
        heads=32,
        kv_heads=8,
        head_dim=head_dim,
        dim=head_dim,
        group=group,
        tokens=rows // group,
        page=64,
        block=block,
        scales=scales,
        softcap=False,
        window=window,
        sinks=False,
        precision="tf32x3" if pages == "*fp32" else "tf32",
        by_length=by_length,
    )
    constants = {"FORM": form} | {name: None for name, kind in types.items() if kind is None}
    names = _attend_tiles.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        _attend_tiles,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"},
    )
    large = rows == MANY_ROWS
    options = {"num_warps": 8 if large else 4, "num_stages": 2, "maxnreg": 128 if large else None}
    return triton.compile(source, target=HOPPER, options=options)
