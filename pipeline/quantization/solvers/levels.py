"""The levels between which a weight's numbers are rounded: what `learned_rounding.py` knows of a format."""

from typing import Protocol

from torch import Tensor

from ....layouts.formats.weight_format import Weight


class Levels(Protocol):
    """The levels of one weight [N, K]: each of its numbers is on one of the levels 0..`top` of its group.

    top:    the highest level
    chosen: fp32 [N, K], whole numbers: the levels of the weight that this was made from
    groups: the number of groups of a row, each of which has a scale
    """

    top: int
    chosen: Tensor
    groups: int

    def positions(self, values: Tensor) -> Tensor:
        """Return where values [N, K] lie among the levels, fp32 [N, K] from 0 to `top`, with fractions in
        between.
        """
        ...

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        """Return the numbers of `levels` [N, K], fp32 [N, K], after scales were multiplied by `factors` [N,
        groups] and rounded as they would be stored."""
        ...

    def weight(self, levels: Tensor, factors: Tensor) -> Weight:
        """Return the quantized weight whose `dequantize` gives the result of `values`."""
        ...
