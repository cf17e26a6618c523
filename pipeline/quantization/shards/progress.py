"""The bar that a quantize job shows over bytes read, by all of its processes together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....base.progress import progress_bar
from .ranks import Ranks

SAID_AT_ONCE = 16 << 20
"""Bytes: the others are told of so many together."""


@contextmanager
def byte_bar(
    total: int, what: str, ranks: Ranks, progress: bool, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """A call that adds bytes read; at the end all processes have come so far. The first shows the bar.

    done: bytes that are finished from before
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
            if unsaid >= SAID_AT_ONCE or ranks.size == 1:
                say()

        yield read
        say()
        ranks.meet(what, say)
