"""Batch invariance: what a request's bits may depend on, and the sizes that follow from nothing else.

Pure arithmetic, for tests and for whoever writes a kernel; `docs/batch-invariance.md` lists every source.
"""

from collections.abc import Iterator
from typing import Literal, get_args

BatchInvariance = Literal["tuned", "pin", "per-token"]
"""What a request's bits may depend on: `tuned` on its batch, `pin` on its own tokens and the chunks of its
prompt, `per-token` on its own tokens alone."""

INVARIANCE_MODES: tuple[BatchInvariance, ...] = get_args(BatchInvariance)
TUNED: BatchInvariance = INVARIANCE_MODES[0]

FOR_INVARIANCE_ONLY = "is for --batch-invariance pin and per-token only"
"""Why a layout that is there to keep bits refuses where they need not be kept."""

CPU_ROWS = 16
"""Tokens of every pass on a CPU that keeps bits: libraries choose by the number of rows, so it never varies.
More cost a single request more; fewer cost prompts more."""


def row_tiles(count: int, rows: int) -> Iterator[slice]:
    """`count` rows in tiles of `rows`, the last one shorter: where each begins does not depend on `count`."""
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))
