"""Sums whose bits depend on nothing but the numbers, and blocks of rows solved side by side on all cores.

In all solvers, groups lie along the last dimension and their elements along the first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ...machine.cores import available_cores

CPU_CHUNK, GPU_CHUNK = 1 << 17, 1 << 25
"""How many weights are solved at once: as many as stay in one core's cache, and as many as fill a GPU."""


def solve_rows(
    solve: Callable[[slice], None],
    n: int,
    k: int,
    device: torch.device,
    chunks: tuple[int, int] = (CPU_CHUNK, GPU_CHUNK),
) -> None:
    """Run `solve` for blocks of rows of a weight [n, k]; on the CPU, several blocks at a time, each on one
    core.

    chunks: number of weights in a block, on the CPU and on a GPU
    Splitting every small operation over the cores instead waits for the slowest of them each time: on a busy
    machine, hardly anything gets done.
    """
    rows = max(1, chunks[device.type != "cpu"] // k)
    blocks = [slice(start, start + rows) for start in range(0, n, rows)]
    if device.type == "cpu":
        _on_all_cores(solve, blocks)
    else:
        for block in blocks:
            solve(block)


def _on_all_cores(work: Callable[[slice], None], blocks: Sequence[slice]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            for _ in pool.map(work, blocks):
                pass
    finally:
        torch.set_num_threads(threads)


def fold(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, computed in place and in an order that only the length
    decides.
    """
    length = x.shape[0]
    while length > 1:
        half = length // 2
        x[:half] += x[length - half : length]
        length -= half
    return x[0].clone()


def total(values: Tensor) -> float:
    """Return the sum by numpy's pairwise summation, which uses one thread and one order."""
    return float(np.sum(values.cpu().numpy(), dtype=np.float64))
