"""Estimates the least time of the gate's requests, from a product that is timed here; no server is started.

During a run, `serving_check/gate/interleaving.py` estimates the remaining time from its first blocks.
"""

import time
from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.functional import linear

from ...serving_check.settings import WorkloadSettings
from ...serving_check.statistics.decide import LOOKS

SAMPLE_WIDTH, SAMPLE_NUMBERS = 4096, 1 << 24
"""The width and the size of the weight that is timed: too large for most caches, and quickly made."""
PROMPT_ROWS = 512
"""How many prompt tokens are timed together; the time of more is proportional."""
TRIALS = 3


def least_serving_seconds(
    numbers: int, workload: WorkloadSettings, sides: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the least time of the fewest blocks that may decide, for plain models of `numbers` weights on
    `sides` servers in turn.

    Linear layers alone are counted: attention, sampling and the start of servers come on top. Experts count
    as if every token went to all of them.
    """
    repeats = sum(
        workload.waves * _repeat_seconds(numbers, m, workload.at(m), device, dtype)
        for m in workload.measured_ms
    )
    return LOOKS[0] * sides * repeats


def _repeat_seconds(
    numbers: int, m: int, workload: WorkloadSettings, device: torch.device, dtype: torch.dtype
) -> float:
    prompt = m * workload.input_len / PROMPT_ROWS * _seconds_a_number(PROMPT_ROWS, device, dtype)
    return numbers * (workload.output_len * _seconds_a_number(m, device, dtype) + prompt)


@cache
def _seconds_a_number(rows: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the time per weight of one product of `rows` rows, the fastest of a few."""
    columns = SAMPLE_WIDTH
    weight = torch.zeros(SAMPLE_NUMBERS // columns, columns, device=device, dtype=dtype)
    x = torch.zeros(rows, columns, device=device, dtype=dtype)
    return min(_trials(x, weight)) / weight.numel()


def _trials(x: torch.Tensor, weight: torch.Tensor) -> Sequence[float]:
    found = []
    for _ in range(1 + TRIALS):
        started = time.perf_counter()
        linear(x, weight)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        found.append(time.perf_counter() - started)
    return found[1:]
