"""Which linear layer makes an artifact slow at an M, and which layout would have been fast enough.

The chooser's measurements are read (`layouts/choosing/plan.py`); nothing is measured here.
"""

from collections.abc import Mapping

from ...layouts.choosing.explain import lowest_ratio
from ...layouts.choosing.plan import KVMeasurement, LayoutPlan, Measurement, ShapeChoice

MOST = 0.5
"""The share of the lost time from which on writing pages is named as the cause."""
SLOW_WRITE = 2.0
"""A page write is named as slow if its step takes this many times as long as a step without one."""


def diagnose(plan: LayoutPlan, used: Mapping[str, str], m: int, floor: float) -> str:
    """Blame the shape that loses the most time against the unquantized product at M; name all shapes that
    lose.

    used: module name to the layout it was served in, which need not be the plan's own choice.
    """
    losses = []
    slow_from = []
    nearest = m
    for choice in plan.choices:
        layout = next((used[module] for module in choice.modules if module in used), choice.layout)
        first = next(
            (at for at, measurement in choice.curve(layout).items() if measurement.ratio < floor), None
        )
        if first is not None:
            slow_from.append(f"{choice.shape} ({layout}) from M={first}")
        measured = _at(choice, layout, m)
        nearest = nearest if measured is None else measured.m
        if measured is not None and measured.ratio < floor:
            lost = measured.microseconds - measured.baseline_microseconds
            losses.append((lost * len(choice.modules), choice, measured))
    if not losses and nearest != m:
        return (
            f"Every linear layer by itself is at or above the floor at M={nearest}; at M={m} none was "
            f"measured by itself. `pipeline layout --m {m}` measures there."
        )
    if not losses:
        return (
            "Every linear layer by itself is at or above the floor at this M, so the time is lost elsewhere: "
            "attention, sampling, or the engine's own work between steps."
        )
    _, choice, slow = max(losses, key=lambda loss: loss[0])
    return (
        f"Most of the time is lost in {choice.shape} ({len(choice.modules)} layers): layout {slow.layout}, "
        f"kernel {slow.kernel}, takes {slow.microseconds:.0f} µs at M={slow.m} where the unquantized product "
        f"takes {slow.baseline_microseconds:.0f} ({slow.ratio:.2f}×, floor {floor:.2f}). "
        f"{_advice(choice, slow, floor)} "
        f"Shapes below the floor on their own: {', '.join(slow_from)}."
    )


def kv_sentence(timed: KVMeasurement | None) -> str:
    """Return the time to store and attend in the artifact's KV format; empty if it is no slower than
    unquantized.
    """
    if timed is None or timed.ratio >= 1:
        return ""
    return (
        f"With keys and values as {timed.kv_format}, storing and attending takes "
        f"{timed.microseconds / 1e3:.2f} ms of a decode step at M={timed.m} and contexts of {timed.context} "
        f"tokens; unquantized, {timed.baseline_microseconds / 1e3:.2f} ({timed.ratio:.2f}×). "
        f"{_writing(timed)}"
        "`pipeline layout` says which KV format pays from which context on."
    )


def _writing(timed: KVMeasurement) -> str:
    """Return a sentence that says so if most of the time is lost on writing full pages; otherwise an empty
    text.
    """
    plain, full = timed.plain_microseconds, timed.full_page_microseconds
    if not plain or not full or timed.writing_share < MOST or full < SLOW_WRITE * plain:
        return ""
    return (
        f"{timed.writing_share:.0%} of the extra time is spent writing full pages: a step that completes a "
        f"page for every request takes {full / 1e3:.2f} ms, {full / plain:.0f} times a step that completes "
        f"none ({plain / 1e3:.2f} ms). Look at the kernel that writes pages, not at attention. "
    )


def _at(choice: ShapeChoice, layout: str, m: int) -> Measurement | None:
    """Return the measurement of `layout` at the smallest measured M of at least `m`, or at the largest
    measured M.
    """
    curve = choice.curve(layout)
    return next((measurement for measured, measurement in curve.items() if measured >= m), None) or next(
        reversed(curve.values()), None
    )


def _advice(choice: ShapeChoice, slow: Measurement, floor: float) -> str:
    """Return a sentence about the fastest other layout that reaches the floor at every M, if there is one."""
    others = [layout for layout in choice.measured_layouts if layout != slow.layout]
    if not others:
        return "No other layout serves this shape here; `pipeline doctor` says what could be installed."
    passing = [layout for layout in others if lowest_ratio(choice, layout) >= floor]
    if not passing:
        best = max(others, key=lambda layout: lowest_ratio(choice, layout))
        return (
            f"No other layout here reaches the floor at every M; the least slow is {best}, "
            f"at least {lowest_ratio(choice, best):.2f}×."
        )
    at_m = {
        layout: measurement for layout in passing if (measurement := _at(choice, layout, slow.m)) is not None
    }
    best = min(at_m, key=lambda layout: at_m[layout].microseconds)
    return (
        f"Layout {best} would have passed: {at_m[best].microseconds:.0f} µs at M={slow.m} "
        f"({at_m[best].ratio:.2f}×), at least {lowest_ratio(choice, best):.2f}× at every M."
    )
