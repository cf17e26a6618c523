"""Compiled loops that store what they read: all threads have read before one stores, and stored before it is
read again."""

import contextlib

import pytest

pytest.importorskip("triton")

import torch
import torch._inductor.config
from scalegate.serving_check.engine.compiling.inplace_barriers import BARRIER, barriers_in_loops
from scalegate.tests.kernels.test_inductor_pdl import Write, written  # noqa: F401
from torch import Tensor

LOOPS = torch._inductor.config.patch({"triton.persistent_reductions": False})


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum takes the place of a buffer that nothing else reads any more."""
    before = x + residual
    total = torch.cumsum(before, 0) + before
    return total, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def the_norms_kernel(written: Write, *ways: contextlib.AbstractContextManager) -> list[str]:  # noqa: F811
    with contextlib.ExitStack() as stack:
        for way in ways:
            stack.enter_context(way)
        kernels = written(residual_norm, contextlib.nullcontext())
    return next(lines for lines in kernels if any("rsqrt" in line for line in lines))


def at(lines: list[str], word: str) -> list[int]:
    return [number for number, line in enumerate(lines) if word in line]


def test_a_barrier_stands_before_each_store_in_place_and_each_loop_that_reads_it(written: Write):  # noqa: F811
    lines = the_norms_kernel(written, LOOPS, barriers_in_loops())
    barriers, stores = at(lines, BARRIER), at(lines, "tl.store(in_out_ptr0")
    loads, loops = at(lines, "tl.load(in_out_ptr0"), at(lines, "for r0_offset")
    assert len(stores) == 1 and len(loops) == 2 and len(loads) == 2, "the case in question"
    assert barriers == [stores[0] - 1, loops[1] - 1]


def test_the_compiler_left_alone_puts_none(written: Write):  # noqa: F811
    assert not at(the_norms_kernel(written, LOOPS), BARRIER)
