"""Steps of requests with states, and what slots must hold after them. Not a test by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scalegate.kernels.states.batch import StateBatch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUT_OF_RANGE = 1 << 40
"""The row of a padding request."""


@dataclass(frozen=True)
class Step:
    """A step's requests: how many tokens each has, and how many came before them.

    padding: requests of length 0. Each has a token in a step of single tokens, which is then decode-only.
    """

    counts: Sequence[int]
    past: Sequence[int]
    padding: int = 0

    @property
    def slots(self) -> int:
        """Some belong to no request of the step."""
        return len(self.counts) + 2

    @property
    def rows(self) -> Tensor:
        """In another order than the requests."""
        return torch.arange(len(self.counts), 0, -1)

    @property
    def decode_only(self) -> bool:
        return all(count == 1 for count in self.counts)

    @property
    def tokens(self) -> int:
        """With padding tokens: those of padding requests, or else some after the last request."""
        return sum(self.counts) + (self.padding if self.decode_only else 3)

    def batch(self) -> StateBatch:
        counts = torch.tensor([*self.counts, *[0] * self.padding])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        lengths = counts + torch.tensor([*self.past, *[0] * self.padding])
        rows = torch.cat([self.rows, torch.full((self.padding,), OUT_OF_RANGE)])
        return StateBatch(
            starts.to(DEVICE, torch.int32),
            lengths.to(DEVICE, torch.int32),
            rows.to(DEVICE, torch.int64),
            self.decode_only,
        )

    def expected(
        self, slots: Tensor, output: Tensor, scan: Callable[[slice, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and all slots after the step, in float64.

        scan: computes a request's tokens from its state, which it changes in place
        output: as it was before: what no request writes stays, but for padding of a decode-only step
        """
        slots, output = slots.double(), output.double()
        first = 0
        for count, past, row in zip(self.counts, self.past, self.rows.tolist(), strict=True):
            state = slots[row] if past else torch.zeros_like(slots[row])
            output[first : first + count] = scan(slice(first, first + count), state)
            slots[row] = state
            first += count
        if self.decode_only:
            output[first:] = 0
        return output, slots


STEPS = {
    "decodes": Step((1, 1, 1, 1), (5, 0, 64, 1), padding=2),
    "mixed": Step((1, 1, 5, 70, 1, 2), (9, 0, 0, 3, 7, 1), padding=3),
    "chunks": Step((64, 65, 3), (0, 130, 64)),
}


def assert_close(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Compare with float64, element by element."""
    assert found.shape == expected.shape
    assert float(((found.double() - expected).abs() - bound).max()) <= 0
