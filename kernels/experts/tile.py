"""Chooses the tile of a grouped product by the average number of rows per expert, which the host knows
without waiting for the GPU.

Each bucket has one form, so nothing compiles for a new number of tokens.
"""

from dataclasses import dataclass

from ..device import keeps_sums_in_registers

ROWS_PER_EXPERT = (0.25, 5.0, 10.0, 20.0, 48.0, float("inf"))
"""The buckets' upper ends, as the number of assignments divided by the number of experts."""
BLOCK_ROWS = (8, 8, 16, 32, 64, 128)
"""For each bucket, how many assignments of one expert are multiplied together: a matrix instruction's N."""


INVARIANT_ROWS = 16
"""The fewest of a block where bits are kept: eight take another matrix instruction, and packed weights two
sums of K. From sixteen on K is summed in one order, whatever the tile."""


@dataclass(frozen=True)
class Tile:
    """A tile. n: a weight's rows in a CTA; k: columns per step; stages: steps in flight; warps: warps of a
    CTA."""

    n: int
    k: int
    stages: int
    warps: int

    def stages_on(self, capability: tuple[int, int]) -> int:
        """Return how many steps in flight fit in shared memory: two on all GPUs except Hopper and
        Blackwell.
        """
        return 2 if keeps_sums_in_registers(capability) else self.stages

    def warps_on(self, capability: tuple[int, int], block_rows: int) -> int:
        """Return the warps of a CTA: twice as many if a thread would hold more than 64 sums beside its
        operands.
        """
        too_many = self.n * block_rows > 64 * 32 * self.warps and keeps_sums_in_registers(capability)
        return 2 * self.warps if too_many else self.warps


def bucket_of(assignments: int, experts: int) -> int:
    """Return the index into `ROWS_PER_EXPERT`, `BLOCK_ROWS` and every table of tiles."""
    return next(i for i, limit in enumerate(ROWS_PER_EXPERT) if assignments <= limit * experts)


def block_rows_of(assignments: int, experts: int, keeps_bits: bool = False) -> int:
    """Return the number of rows in a block. With keeps_bits, no row's bits depend on the number of
    assignments.
    """
    rows = BLOCK_ROWS[bucket_of(assignments, experts)]
    return max(rows, INVARIANT_ROWS) if keeps_bits else rows
