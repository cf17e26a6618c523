"""Explains a slow plan: which shapes are below the floor, from which M on, and which layout would be fast
enough.

Only a plan's measurements are read; nothing is timed.
"""

import math
from dataclasses import dataclass

from .plan import LayoutPlan, Measurement, ShapeChoice


@dataclass(frozen=True)
class SlowShape:
    """A layer shape whose layout is slower than the floor allows."""

    shape: str
    modules: int
    layout: str
    kernel: str
    m: int
    """The smallest measured M at which it is below the floor."""
    ratio: float
    """Its speed at that M, as a multiple of the unquantized product's."""
    worst_m: int
    worst_ratio: float
    better_layout: str | None
    """A layout at or above the floor at every M, or else the one least below it; None if this one is best."""
    better_ratio: float | None
    """The lowest ratio of `better_layout` over all M."""

    def sentence(self, floor: float) -> str:
        worst = "" if self.worst_m == self.m else f", {self.worst_ratio:.2f}× at M={self.worst_m}"
        text = (
            f"{self.shape} ({self.modules} layers): {self.layout} ({self.kernel}) is at {self.ratio:.2f}× "
            f"the unquantized product from M={self.m}{worst}, below {floor:.2f}×."
        )
        if self.better_layout is None or self.better_ratio is None:
            return f"{text} No other layout here is better."
        if self.better_ratio >= floor:
            return f"{text} {self.better_layout} would have passed: at least {self.better_ratio:.2f}×."
        return f"{text} {self.better_layout} is nearest to it: at least {self.better_ratio:.2f}×."


def explain_slow_layout(plan: LayoutPlan, floor: float) -> list[SlowShape]:
    """Return the shapes whose picked layout is below `floor` × the unquantized product at some M, worst
    first.
    """
    slow = [found for choice in plan.choices if (found := _slow_shape(choice, floor)) is not None]
    return sorted(slow, key=lambda shape: shape.worst_ratio)


def lowest_ratio(choice: ShapeChoice, layout: str) -> float:
    """Return a layout's ratio at the M where it does worst."""
    return min(measurement.ratio for measurement in choice.curve(layout).values())


def mean_ratio(choice: ShapeChoice, layout: str) -> float:
    """Return the geometric mean of a layout's ratio over the measured Ms."""
    logs = [math.log(measurement.ratio) for measurement in choice.curve(layout).values()]
    return math.exp(sum(logs) / len(logs))


def _slow_shape(choice: ShapeChoice, floor: float) -> SlowShape | None:
    curve = list(choice.curve(choice.layout).values())
    below = [measurement for measurement in curve if measurement.ratio < floor]
    if not below:
        return None
    first: Measurement = below[0]
    worst = min(below, key=lambda measurement: measurement.ratio)
    others = [layout for layout in choice.measured_layouts if layout != choice.layout]
    passing = [layout for layout in others if lowest_ratio(choice, layout) >= floor]
    better = None
    if passing:
        better = max(passing, key=lambda layout: mean_ratio(choice, layout))
    elif others:
        nearest = max(others, key=lambda layout: lowest_ratio(choice, layout))
        better = nearest if lowest_ratio(choice, nearest) > worst.ratio else None
    return SlowShape(
        shape=choice.shape,
        modules=len(choice.modules),
        layout=choice.layout,
        kernel=first.kernel,
        m=first.m,
        ratio=first.ratio,
        worst_m=worst.m,
        worst_ratio=worst.ratio,
        better_layout=better,
        better_ratio=lowest_ratio(choice, better) if better is not None else None,
    )
