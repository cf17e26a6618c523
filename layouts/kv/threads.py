"""Threads for attention kernels on a CPU that release the interpreter's lock."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class Threads:
    """Python threads, as many as torch has, for kernels that release the interpreter's lock.

    The threads are started when first needed, so after any fork of the process.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def call(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run all calls; one after another if there is only one thread."""
        threads = min(len(calls), torch.get_num_threads())
        if threads <= 1:
            return _one_by_one(calls)
        self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads() - 1)
        others = [self._pool.submit(_one_by_one, calls[at::threads]) for at in range(1, threads)]
        _one_by_one(calls[::threads])
        for other in others:
            other.result()


def _one_by_one(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
