"""The layout plan as a table for a terminal: shape × M × layout, microseconds and ratio.

Nothing is decided here: the plan has already decided.
"""

from collections.abc import Mapping

from ...layouts.choosing.choose import LOSS_BOUND
from ...layouts.choosing.explain import explain_slow_layout
from ...layouts.choosing.plan import LayoutPlan, Measurement, ShapeChoice
from ...layouts.choosing.tried import Tried
from ...layouts.packing.layout import IS_FOR

PICKED, BEST = ">", "*"
NAME_WIDTH = 22
CELL_WIDTH = 14


def layout_table(plan: LayoutPlan, tried: Mapping[str, Tried], every_refusal: bool = False) -> str:
    """Return the whole plan, one block for each shape, and a sentence about each slow shape.

    tried:         for each of our own layouts, how its kernel was tried on such a GPU
    every_refusal: show each layout that was not measured; otherwise layouts for other formats, devices and
                   kinds of layers are left out
    """
    lines = [
        f"Layouts on {plan.device}: microseconds a product, and speed as a multiple of the unquantized one",
        f"({PICKED} picked, {BEST} quickest at that M)",
    ]
    for choice in plan.choices:
        lines += ["", *_block(choice, every_refusal)]
    if tried:
        lines += ["", "How our own kernels were tried on such a GPU before:"]
        lines += [f"  {name}: {how}" for name, how in tried.items()]
    slow = explain_slow_layout(plan, 1 - LOSS_BOUND)
    if slow:
        lines += ["", "Slower than the unquantized product:"]
        lines += [f"  {loss.sentence(1 - LOSS_BOUND)}" for loss in slow]
    return "\n".join(lines)


def _block(choice: ShapeChoice, every_refusal: bool) -> list[str]:
    ms = sorted({measurement.m for measurement in choice.measurements})
    kinds = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in choice.modules))
    lines = [
        f"{choice.shape}  ({len(choice.modules)} layers: {kinds})",
        " " * NAME_WIDTH + "".join(f"M={m}".rjust(CELL_WIDTH) for m in ms),
    ]
    baseline = {each.m: each.baseline_microseconds for each in choice.measurements}
    if ms:
        cells = [f"{_microseconds(baseline[m])}   1.00× " for m in ms]
        lines.append(_row(" ", "unquantized", cells))
    best = {m: min(_at(choice, m), key=lambda measurement: measurement.microseconds) for m in ms}
    for layout in choice.measured_layouts:
        curve = choice.curve(layout)
        cells = [_cell(curve[m], best[m] is curve[m]) if m in curve else "" for m in ms]
        lines.append(_row(PICKED if layout == choice.layout else " ", layout, cells))
    for layout, reason in choice.refusals.items():
        if every_refusal or not reason.startswith(IS_FOR):
            lines.append(f"    {layout}: not measured, {reason}")
    lines.append(f"  {choice.layout}: {choice.reason}")
    return lines


def _at(choice: ShapeChoice, m: int) -> list[Measurement]:
    return [measurement for measurement in choice.measurements if measurement.m == m]


def _row(mark: str, name: str, cells: list[str]) -> str:
    return f"{mark} {name}".ljust(NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)


def _cell(measurement: Measurement, is_best: bool) -> str:
    mark = BEST if is_best else " "
    return f"{_microseconds(measurement.microseconds)} {measurement.ratio:6.2f}×{mark}"


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
