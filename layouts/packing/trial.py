"""Whether a layout's kernel compiles and runs here, tried once a process on a small weight.

A version of Triton that `kernels/` was not tested with may fail to compile a kernel of ours. The layout then
refuses with the compiler's message, and the next layout serves. Speed and accuracy are measured in
`measure.py`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...base.installed import kernel_versions
from .layout import AnyLayout, Experts, ExpertsLayout, Problem
from .routing import Routing

SMALL_N, SMALL_K = 256, 512
DOES_NOT_RUN = "does not run with Triton"
"""How such a refusal begins."""
REASONS: dict[tuple[str, torch.dtype], str] = {}
"""By layout and dtype, why the kernel does not run here; empty if it runs. One trial is enough for all shapes
and parameters of a format, since they are compiled from one source."""


def trial_refusal(layout: AnyLayout, problem: Problem) -> str | None:
    """Return None if the layout multiplies one row by a small weight of the problem's format; otherwise why
    not.
    """
    if problem.device.type != "cuda" or not torch.cuda.is_available():
        return None
    tried = layout.name, problem.dtype
    if tried not in REASONS:
        REASONS[tried] = failure(layout, small(problem))
    return REASONS[tried] or None


def small(problem: Problem) -> Problem:
    """Return the same problem with at most two experts, and in a small shape if its format allows that."""
    experts = None if problem.experts is None else Experts(count=2, top_k=1)
    problem = replace(problem, experts=experts)
    if problem.spec.refuses(SMALL_N, SMALL_K) is None:
        problem = replace(problem, n=SMALL_N, k=SMALL_K)
    return problem


def failure(layout: AnyLayout, problem: Problem) -> str:
    """Return why multiplying one row failed, in one line; empty if it did not."""
    try:
        multiply_one_row(layout, problem)
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
        return f"{DOES_NOT_RUN} {kernel_versions().get('triton', '(not installed)')}: {reason}"
    return ""


def multiply_one_row(layout: AnyLayout, problem: Problem) -> Tensor:
    """Multiply a row of zeros by a random weight."""
    x = torch.zeros(1, problem.k, dtype=problem.dtype, device=problem.device)
    if isinstance(layout, ExpertsLayout):
        count = problem.experts.count if problem.experts else 1
        weights = [problem.spec.random(problem.n, problem.k, problem.device) for _ in range(count)]
        expert = torch.zeros(1, 1, dtype=torch.int32, device=problem.device)
        packed = layout.pack_experts(weights, problem.dtype)
        return layout.grouped_matmul(x, packed, Routing.of(expert, count, problem.batch_invariance))
    weight = problem.spec.random(problem.n, problem.k, problem.device)
    return layout.matmul(x, layout.pack(weight, problem.dtype))
