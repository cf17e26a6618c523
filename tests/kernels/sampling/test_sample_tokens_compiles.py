"""The sampling kernel compiles for a GPU, without one: interpreters take what compilers refuse."""

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.sampling.sample_tokens import BLOCK, _sample
from scalegate.tests.exhaustive import exhaustive_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize(
    "logits, bits", exhaustive_but([("*bf16", 16), ("*fp16", 32), ("*fp32", 32)], ("*bf16", 16))
)
def test_every_kind_of_logits_compiles(logits: str, bits: int):
    types = {
        "logits_ptr": logits,
        **dict.fromkeys(["rows_ptr", "positions_ptr", "integers_ptr", "out_ptr"], "*i64"),
        "numbers_ptr": "*fp32",
        "logits_stride": "i32",
    }
    constants = {"VOCAB": 151936, "BLOCK": BLOCK, "BITS": bits}
    names = _sample.arg_names
    # What a launch tells the compiler: of a vocabulary of 151,936 that rows, too, begin on 16 bytes.
    aligned = [
        parameter.name
        for parameter in _sample.params
        if parameter.name in types and not parameter.do_not_specialize
    ]
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        _sample,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": 16})
    # Each pass reads its block 16 bytes a thread at a time: nothing is loaded logit by logit.
    loads = [line for line in kernel.asm["ptx"].splitlines() if "ld.global" in line and "b16 " in line]
    assert kernel.asm["cubin"] and not loads
