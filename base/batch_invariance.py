"""Batch invariance: the modes, and the sizes that do not depend on the batch.

`docs/batch-invariance.md` lists everything that could make a request's bits depend on other requests.
"""

from collections.abc import Iterator
from typing import Literal, get_args

BatchInvariance = Literal["tuned", "pin", "per-token"]
"""The modes of batch invariance: what the bits of a request's output may depend on.

`tuned`:     its own tokens and every other request in its batch
`pin`:       its own tokens, and which of them came from the prompt and which were decoded
`per-token`: its own tokens alone
"""

INVARIANCE_MODES: tuple[BatchInvariance, ...] = get_args(BatchInvariance)
TUNED: BatchInvariance = INVARIANCE_MODES[0]

CPU_ROWS = 16
"""Tokens in every forward pass on a CPU if serving is batch-invariant.

Libraries choose an algorithm by the number of rows, so that number never changes. A larger one would slow
down a single request; a smaller one would slow down prefill.
"""


def row_tiles(count: int, rows: int) -> Iterator[slice]:
    """Yield `count` rows in tiles of `rows`, the last tile shorter. The place where a tile begins does not
    depend on `count`.
    """
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))
