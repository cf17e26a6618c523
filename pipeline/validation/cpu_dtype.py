"""Finds the dtype that a CPU multiplies faster, bfloat16 or float32: many CPUs have no bfloat16 arithmetic
and emulate it.

A baseline that runs in the slower dtype would be beaten by its dtype, not by the artifact.
"""

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...serving_check.engine.options import AUTO, EngineOptions
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype

LEAST_GAIN = 1.1
"""How many times faster float32 must be to be chosen, since it takes twice the memory."""
SECONDS_A_PRODUCT = 0.05
LEAST_REPEATS = 5
MOST_SIDE = 2048
"""The largest N and K of the timed product: a larger one takes longer and shows no more."""


def baseline_dtype(baseline: Checkpoint, options: EngineOptions, rows: Sequence[int]) -> str:
    """Return the dtype that the baseline is to run in; `options.dtype` unless that leaves a CPU the choice.

    rows: the numbers of rows of the timed products: the Ms, and the tokens of a prompt
    """
    if options.dtype != AUTO or not options.device.startswith("cpu"):
        return options.dtype
    if default_dtype(baseline) != torch.bfloat16:
        return options.dtype
    config = baseline.config.get("text_config") or baseline.config
    sides = [config.get(name) for name in ("intermediate_size", "hidden_size")]
    n, k = (min(side, MOST_SIDE) if isinstance(side, int) and side > 0 else 1024 for side in sides)
    return faster_dtype(n, k, rows)


def faster_dtype(n: int, k: int, rows: Sequence[int]) -> str:
    """Return `bfloat16`, or `float32` if this CPU's products y [rows, N] = x [rows, K] · Wᵀ are faster in
    it.
    """
    threads = torch.get_num_threads()
    # One thread is seldom kept waiting by whatever else runs, and tells as much about the arithmetic.
    torch.set_num_threads(1)
    try:
        times = [_seconds(torch.randn(n, k), torch.randn(m, k)) for m in rows]
    finally:
        torch.set_num_threads(threads)
    gain = math.fsum(math.log(half / single) for half, single in times) / len(times)
    return "float32" if gain > math.log(LEAST_GAIN) else "bfloat16"


def _seconds(weight: Tensor, x: Tensor) -> tuple[float, float]:
    """Return the product's least time in bfloat16 and in float32, in turn, so that a busy moment meets
    both.
    """
    operands = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    least = [math.inf, math.inf]
    ends, repeats = time.perf_counter() + SECONDS_A_PRODUCT, 0
    while repeats < LEAST_REPEATS or time.perf_counter() < ends:
        for side, (rows, matrix) in enumerate(operands):
            started = time.perf_counter()
            linear(rows, matrix)
            least[side] = min(least[side], time.perf_counter() - started)
        repeats += 1
    return least[0], least[1]
