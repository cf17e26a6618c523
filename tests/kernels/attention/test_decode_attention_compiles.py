"""The paged decode kernels compile for a GPU, without one: interpreters take what compilers refuse."""

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.attention import decode as decode_attention
from scalegate.tests.exhaustive import exhaustive_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SCALE_POINTERS = {0: None, 1: "*fp32", 2: "*fp32"}


def compiled(kernel, types: dict[str, str | None], constants: dict[str, object], **options):
    """Arguments whose type is None are None."""
    constants = {**constants, **{name: None for name, kind in types.items() if kind is None}}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, indices), target=HOPPER, options=options)


@pytest.mark.parametrize(
    "pages, scales",
    exhaustive_but([("*bf16", 0), ("*fp32", 0), ("*i16", 1), ("*i16", 2)], ("*bf16", 0), ("*i16", 1)),
)
@pytest.mark.parametrize("sinks", exhaustive_but([False, True], False))
def test_every_kind_of_page_compiles(pages: str, scales: int, sinks: bool):
    activations = "*bf16" if scales else pages
    types = {
        **dict.fromkeys(["q_ptr", "out_ptr"], activations),
        **dict.fromkeys(["key_ptr", "value_ptr"], pages),
        **dict.fromkeys(["block_table_ptr", "lengths_ptr"], "*i32"),
        **dict.fromkeys(["key_scale_ptr", "value_scale_ptr"], SCALE_POINTERS[scales]),
        **dict.fromkeys(["partial_ptr", "lse_ptr"], "*fp32"),
        **dict.fromkeys(["scale_log2", "softcap"], "fp32"),
        **dict.fromkeys(["window", "table_stride", "max_splits"], "i32"),
    }
    form = decode_attention.Form(
        heads=32,
        kv_heads=8,
        head_dim=128,
        dim=128,
        group=16,
        page=64,
        split=256,
        block=64,
        fine=scales == 0,
        scales=scales,
        softcap=False,
        window=False,
        sinks=sinks,
        asm=True,
        pdl=True,
        precision="tf32x3" if activations == "*fp32" else "tf32",
    )
    kernel = compiled(decode_attention._attend_splits, types, {"FORM": form}, num_warps=4)
    assert kernel.asm["cubin"]


@pytest.mark.parametrize(
    "sinks, rotated", exhaustive_but([(None, False), ("*bf16", False), (None, True)], (None, False))
)
def test_the_merge_compiles(sinks: str | None, rotated: bool):
    types = {
        **dict.fromkeys(["partial_ptr", "lse_ptr"], "*fp32"),
        "lengths_ptr": "*i32",
        "sinks_ptr": sinks,
        "out_ptr": "*bf16",
        **dict.fromkeys(["window", "max_splits"], "i32"),
    }
    constants = {"HEADS": 32, "HEAD_DIM": 128, "DIM": 128, "SPLIT": 256, "BLOCK": 64, "FINE": True}
    flags = {"SPLITS_AT_ONCE": 8, "SINKS": sinks is not None, "WINDOW": True, "PDL": True}
    flags |= {"ROTATED": rotated, "LOG_DIM": 7}
    assert compiled(decode_attention._merge_splits, types, {**constants, **flags}, num_warps=1).asm["cubin"]
