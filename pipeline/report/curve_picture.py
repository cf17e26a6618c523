"""The throughput ratio at every M as an SVG: intervals, the floor, and which M failed.

The SVG has class names and no colours, so that the page's style sheet can draw it in light, dark and print.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ...serving_check.evidence.verdict import CurvePoint, Verdict

LEFT, TOP, BOTTOM = 46, 20, 46
"""Pixels around the plot."""
RIGHT, NARROW_RIGHT = 86, 46
"""Pixels to the right of the plot, for the names of the two lines; a narrow picture has short names."""
NARROW = 480
LABEL_HEIGHT = 15
MOST_TICKS = 6
WIDEST_DRAWN = 3
"""Limits beyond this multiple of the highest ratio are drawn to the plot's edge: a limit from two values may
be of any size, and the ratios would lie on one line."""
NICE_STEPS = (1, 2, 5, 10)
LARGE, SMALL = 5.0, 3.0
"""Half the width of a mark in pixels."""


@dataclass(frozen=True)
class Mark:
    """One ratio at one M, with its 95% interval; a limit is None if it is unbounded."""

    m: int
    ratio: float
    low: float | None
    high: float | None
    status: str
    drawn: bool = False
    """Whether M was drawn between the given ones: a smaller mark, without its number."""


@dataclass(frozen=True)
class Series:
    """Marks joined by a line; `kind` is its class in the style sheet."""

    kind: str
    title: str
    marks: list[Mark]
    labelled: bool = False


@dataclass(frozen=True)
class Scale:
    """The positions of Ms and ratios in the picture."""

    width: int
    height: int
    ms: list[int]
    low: float
    high: float

    @property
    def is_narrow(self) -> bool:
        return self.width < NARROW

    @property
    def right(self) -> int:
        """Return the x coordinate at which the plot ends."""
        return self.width - (NARROW_RIGHT if self.is_narrow else RIGHT)

    def x(self, m: int) -> float:
        return round(LEFT + (self.ms.index(m) + 0.5) / len(self.ms) * (self.right - LEFT), 1)

    def y(self, ratio: float) -> float:
        clipped = max(self.low, min(self.high, ratio))
        share = (self.high - clipped) / (self.high - self.low)
        return round(TOP + share * (self.height - TOP - BOTTOM), 1)


def draw_curve(verdict: Verdict, width: int, height: int, kind: str = "") -> str:
    """Return the whole SVG, `width` by `height` pixels; empty if no ratio was measured.

    kind: a further class of the SVG
    """
    if not any(point.ratio is not None for point in verdict.curve):
        return ""
    low, high = ratio_span([verdict])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curve {kind}" '
        f'viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(curve_in_words(verdict))}">'
        f"{curve_marks(verdict, Scale(width, height, asked_ms(verdict), low, high))}</svg>"
    )


def ratio_span(verdicts: Sequence[Verdict]) -> tuple[float, float]:
    """Return the lowest and highest ratio to draw, so that every mark, its label, both lines and limits up to
    `WIDEST_DRAWN` are inside.
    """
    marks = [mark for verdict in verdicts for series in series_of(verdict) for mark in series.marks]
    levels = [
        1.0,
        *(verdict.bounds.throughput_floor for verdict in verdicts),
        *(mark.ratio for mark in marks),
    ]
    limits = [limit for mark in marks for limit in (mark.low, mark.high) if limit is not None]
    most = WIDEST_DRAWN * max(levels)
    levels += [min(limit, most) for limit in limits]
    room = 0.12 * (max(levels) - min(levels) or 1.0)
    return max(0.0, min(levels) - room), max(levels) + room


def curve_in_words(verdict: Verdict) -> str:
    """Return a description of the picture for people who cannot see it."""
    points = "; ".join(
        f"M={point.m}: {point.ratio:.2f}, {point.status}"
        for point in verdict.curve
        if point.ratio is not None
    )
    floor = verdict.bounds.throughput_floor
    return f"Throughput of {verdict.artifact.name} ÷ {verdict.baseline.name}, floor {floor:g}. {points}."


def asked_ms(verdict: Verdict) -> list[int]:
    """Return every M that was given or drawn, measured or not."""
    return sorted({*verdict.workload.measured_ms, *(point.m for point in verdict.curve)})


def series_of(verdict: Verdict) -> list[Series]:
    """Return the series to draw. The artifact comes last, so that it is drawn over the other sides."""
    curve = verdict.curve
    # Where prompts take little of the time, decoding alone is what whole requests are.
    apart = [point for point in curve if point.prompts or verdict.workload.decoding_apart]
    found = [
        Series("rival", "artifact ÷ rival", _marks(curve, lambda point: point.rival)),
        Series("steady", "decoding alone", _marks(apart, lambda point: point.steady)),
        Series("prompts", "prompts alone", _marks(curve, lambda point: point.prompts)),
        Series("artifact", "artifact ÷ baseline", _marks(curve, lambda point: point), labelled=True),
    ]
    return [series for series in found if series.marks]


def _marks(curve: Sequence[CurvePoint], part: Callable[[CurvePoint], object]) -> list[Mark]:
    return [
        Mark(
            point.m,
            ratio,
            getattr(figures, "ratio_low", None),
            getattr(figures, "ratio_high", None),
            getattr(figures, "status", None) or "unknown",
            point.drawn,
        )
        for point in curve
        if (figures := part(point)) is not None and (ratio := getattr(figures, "ratio", None)) is not None
    ]


def curve_marks(verdict: Verdict, scale: Scale) -> str:
    """Return the picture's elements, without the `svg` around them."""
    floor = verdict.bounds.throughput_floor
    parts = [*_axes(verdict, scale), *_lines(floor, scale)]
    series = series_of(verdict)
    for each in series:
        parts += _series(each, scale)
    if len(series) > 1:
        parts += _legend(series)
    return "".join(parts)


def _axes(verdict: Verdict, scale: Scale) -> list[str]:
    right, bottom = scale.right, scale.height - BOTTOM
    parts = []
    for tick in _ticks(scale.low, scale.high):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}×</text>')
    statuses = {point.m: point.status for point in verdict.curve}
    for m in scale.ms:
        kind = f"tick m {escape(statuses.get(m, 'unmeasured'))}"
        parts.append(
            f'<text class="{kind}" x="{scale.x(m)}" y="{bottom + 20}" text-anchor="middle">{m}</text>'
        )
    middle = (LEFT + right) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{scale.height - 6}" text-anchor="middle">'
        "M: requests at once</text>"
    )
    return parts


def _lines(floor: float, scale: Scale) -> list[str]:
    """Return the baseline's line and the floor's, labelled at their right ends, and the area below the
    floor.
    """
    right, bottom = scale.right, scale.height - BOTTOM
    at_one, at_floor = scale.y(1.0), scale.y(floor)
    name_one, name_floor = at_one + 4, at_floor + 4
    overlap = LABEL_HEIGHT - abs(name_floor - name_one)
    if overlap > 0:
        shift = overlap / 2 if name_floor >= name_one else -overlap / 2
        name_one, name_floor = name_one - shift, name_floor + shift
    names = ("base", "floor") if scale.is_narrow else ("baseline", f"floor {floor:g}×")
    return [
        f'<rect class="below" x="{LEFT}" width="{right - LEFT}" y="{at_floor}"'
        f' height="{max(0.0, round(bottom - at_floor, 1))}"/>',
        f'<line class="baseline" x1="{LEFT}" x2="{right}" y1="{at_one}" y2="{at_one}"/>',
        f'<line class="floor" x1="{LEFT}" x2="{right}" y1="{at_floor}" y2="{at_floor}"/>',
        f'<text class="baseline-name" x="{right + 6}" y="{name_one:.1f}">{names[0]}</text>',
        f'<text class="floor-name" x="{right + 6}" y="{name_floor:.1f}">{names[1]}</text>',
    ]


def _series(series: Series, scale: Scale) -> list[str]:
    line = " ".join(f"{scale.x(mark.m)},{scale.y(mark.ratio)}" for mark in series.marks)
    parts = [f'<polyline class="line {series.kind}" points="{line}"/>']
    for mark in series.marks:
        kind = f"{series.kind} {escape(mark.status)}"
        parts += [
            _interval(mark, kind, scale),
            _mark(scale.x(mark.m), scale.y(mark.ratio), mark.status, kind, SMALL if mark.drawn else LARGE),
        ]
        if series.labelled and not mark.drawn:
            parts.append(_label(mark, kind, scale))
    return parts


def _interval(mark: Mark, kind: str, scale: Scale) -> str:
    """Return a bar from limit to limit; empty if there is no upper limit, after too few blocks for one."""
    if mark.high is None:
        return ""
    x, top, foot = scale.x(mark.m), scale.y(mark.high), scale.y(mark.low or scale.low)
    return f'<path class="interval {kind}" d="M{x} {top}V{foot}M{x - 5} {top}h10M{x - 5} {foot}h10"/>'


def _label(mark: Mark, kind: str, scale: Scale) -> str:
    """Return the ratio's label: over the bar; under it for a fail; beside the mark if there is no bar."""
    x, y, anchor = scale.x(mark.m), scale.y(mark.ratio) + 4, "middle"
    foot = scale.y(mark.low or scale.low)
    if mark.high is None:
        x, anchor = x + 10, "start"
    elif mark.status == "fail" and foot + 19 < scale.height - BOTTOM:
        y = foot + 19
    else:
        y = scale.y(mark.high) - 9
    return f'<text class="value {kind}" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{mark.ratio:.2f}</text>'


def _mark(x: float, y: float, status: str, kind: str, size: float) -> str:
    """Return a dot for a pass, a cross for a fail, an open circle otherwise: marks that differ without
    colour.
    """
    if status == "fail":
        low, high, span = f"{x - size:g}", f"{y - size:g}", f"{2 * size:g}"
        return (
            f'<path class="mark {kind}" d="M{low} {high}l{span} {span}M{low} {y + size:g}l{span} -{span}"/>'
        )
    return f'<circle class="mark {kind}" cx="{x}" cy="{y}" r="{size:g}"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = float(LEFT)
    for each in series:
        parts.append(f'<circle class="mark pass {each.kind}" cx="{x + 5}" cy="9" r="4"/>')
        parts.append(f'<text class="tick" x="{x + 14}" y="13">{escape(each.title)}</text>')
        x += 30 + 7 * len(each.title)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in NICE_STEPS if nice * power >= rough or nice == NICE_STEPS[-1])
    first = int(low / step) + (low % step > 0)
    return [round(index * step, 6) for index in range(first, int(high / step) + 1)]
