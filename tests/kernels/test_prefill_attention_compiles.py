"""The paged prefill kernel compiles for a GPU, without one: interpreters take what compilers refuse."""

import pytest
import triton
from scalegate.kernels.prefill_attention import _attend_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SCALE_POINTERS = {0: None, 1: "*fp32", 2: "*fp32"}


@pytest.mark.parametrize(
    "pages, scales, window, large",
    [
        ("*bf16", 0, False, True),
        ("*bf16", 0, True, True),
        ("*bf16", 0, False, False),
        ("*fp32", 0, False, False),
        ("*fp8e4nv", 1, False, False),
        ("*fp16", 1, False, True),
        ("*fp16", 2, False, True),
        ("*i8", 2, False, False),
    ],
)
def test_every_kind_of_page_compiles(pages: str, scales: int, window: bool, large: bool):
    activations = "*bf16" if scales else pages
    wide = pages == "*fp32"
    types = {
        **dict.fromkeys(["q_ptr", "out_ptr"], activations),
        **dict.fromkeys(["key_ptr", "value_ptr"], pages),
        **dict.fromkeys(["table_ptr", "tiles_ptr"], "*i32"),
        **dict.fromkeys(["key_scale_ptr", "value_scale_ptr"], SCALE_POINTERS[scales]),
        "sinks_ptr": None,
        **dict.fromkeys(["scale_log2", "softcap"], "fp32"),
        **dict.fromkeys(["window", "table_stride"], "i32"),
    }
    constants = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "GROUP": 4, "PAGE": 64}
    constants |= {"TOKENS": 32 if large else 16, "BLOCK": 32 if wide else 64, "SCALES": scales}
    constants |= {"SOFTCAP": False, "WINDOW": window, "SINKS": False}
    constants |= {"PRECISION": "tf32x3" if wide else "tf32"}
    constants |= {name: None for name, kind in types.items() if kind is None}
    names = _attend_tiles.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        _attend_tiles,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"},
    )
    options = {"num_warps": 8 if large else 4, "num_stages": 2, "maxnreg": 128 if large else None}
    kernel = triton.compile(source, target=HOPPER, options=options)
    assert "wgmma" in kernel.asm["ptx"]
