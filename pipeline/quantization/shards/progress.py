"""The bar that a quantize job shows over bytes read, by all of its processes together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....base.progress import progress_bar
from .ranks import Ranks

REPORT_BYTES = 16 << 20
"""How many bytes are read between two reports of progress to the other processes."""


@contextmanager
def byte_bar(
    total: int, what: str, ranks: Ranks, progress: bool, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yield a function to report bytes read; on leaving, wait for all processes. The job's first process
    shows the bar. done: bytes that an earlier run has finished
    """
    shown = progress and ranks.is_first
    unsaid = 0
    with progress_bar(total=total, initial=done, desc=what, unit="B", unit_scale=True, shown=shown) as bar:

        def say() -> None:
            nonlocal unsaid
            together = done + ranks.count(f"{what} bytes", unsaid)
            unsaid = 0
            bar.update(together - bar.n)

        def read(nbytes: int) -> None:
            nonlocal unsaid
            unsaid += nbytes
            if unsaid >= REPORT_BYTES or ranks.size == 1:
                say()

        yield read
        say()
        ranks.meet(what, say)
