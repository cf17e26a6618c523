"""Chooses a format for each group of layers under a budget: of bits, or of divergence.

Divergences of single groups are added up, which holds for small divergences: each is about quadratic in its
own error, and errors of different layers hardly correlate. Starting from the cheapest formats, the choice
takes the step with the largest gain per bit first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ....base.errors import UserError
from ....layouts.formats.unquantized import Unquantized
from ....layouts.formats.weight_format import WeightFormat
from .sensitivity import Group

PLAIN = Unquantized()
PLAIN_BITS = PLAIN.bits_per_weight(1, 1)


@dataclass(frozen=True)
class Budget:
    """A limit on bits or on divergence.

    bits:       the most bits per weight, on average over all weights that the recipe quantizes
    divergence: the largest mean KL in nats, summed over the groups' measurements
    """

    bits: float | None = None
    divergence: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError if both limits are given, or a value is impossible."""
        if self.bits is not None and self.divergence is not None:
            raise UserError("--target-bits and --max-kl exclude each other; give one")
        if not all(value is None or value > 0 for value in (self.bits, self.divergence)):
            raise UserError("--target-bits and --max-kl are positive numbers")
        if self.bits is not None and self.bits >= PLAIN_BITS:
            raise UserError(
                f"--target-bits {self.bits:g}: weights that are not quantized take {PLAIN_BITS:g} bits; "
                "give fewer"
            )


@dataclass(frozen=True)
class Allocation:
    """A format for each group, and the expected cost of all groups.

    fixed: the number of quantized weights outside the groups, and their total number of bits
    """

    groups: tuple[Group, ...]
    chosen: tuple[WeightFormat, ...]
    fixed: tuple[int, float] = (0, 0.0)

    @property
    def bits(self) -> float:
        """Return the average bits per weight, scales and zero points included."""
        weights, total = self.fixed
        total += sum(_bits(group, spec) for group, spec in zip(self.groups, self.chosen, strict=True))
        return total / (weights + sum(group.weights for group in self.groups))

    @property
    def divergence(self) -> float:
        return sum(_cost(group, spec) for group, spec in zip(self.groups, self.chosen, strict=True))

    def by_module(self) -> dict[str, WeightFormat]:
        pairs = zip(self.groups, self.chosen, strict=True)
        return {module: spec for group, spec in pairs for module in group.modules}


def allocate(groups: Sequence[Group], budget: Budget, fixed: tuple[int, float] = (0, 0.0)) -> Allocation:
    """Return the formats that reduce the loss most within `budget`. Raise UserError if even the smallest
    formats need more bits.

    fixed: as in `Allocation`
    """
    smallest = tuple(min(group.divergence, key=partial(_bits, group)) for group in groups)
    now = Allocation(tuple(groups), smallest, fixed)
    if budget.bits is not None and now.bits > budget.bits:
        raise UserError(
            f"--target-bits {budget.bits:g}: the smallest formats of the recipe take {now.bits:.3f} bits each"
        )
    while budget.divergence is None or now.divergence > budget.divergence:
        steps = [
            (-(_cost(group, spec) - _cost(group, now.chosen[index])) / more, index, spec)
            for index, group in enumerate(groups)
            for spec in (*group.divergence, PLAIN)
            if (more := _bits(group, spec) - _bits(group, now.chosen[index])) > 0
        ]
        fitting = [step for step in steps if step[0] > 0 and _fits(now, step[1], step[2], budget)]
        if not fitting:
            break
        _, index, spec = max(fitting, key=lambda step: (step[0], -step[1]))
        now = _with(now, index, spec)
    return now


def _fits(now: Allocation, index: int, spec: WeightFormat, budget: Budget) -> bool:
    return budget.bits is None or _with(now, index, spec).bits <= budget.bits


def _with(now: Allocation, index: int, spec: WeightFormat) -> Allocation:
    return replace(now, chosen=(*now.chosen[:index], spec, *now.chosen[index + 1 :]))


def _bits(group: Group, spec: WeightFormat) -> float:
    """Return the total number of bits of the group in this format."""
    return sum(spec.bits_per_weight(n, k) * n * k for n, k in group.shapes)


def _cost(group: Group, spec: WeightFormat) -> float:
    return 0.0 if spec == PLAIN else group.divergence[spec]
