"""The four plots of a verdict, as PNG: throughput, ratio, TPOT and TTFT against M, every side in each.

The plots are drawn from the verdict alone, so they can be drawn again from `serving_check.json`.
"""

import io
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...serving_check.evidence.verdict import ServingFigures, Verdict
from .names import ARTIFACT_COLOUR, BASELINE_COLOUR, FLOOR_COLOUR, RIVAL_COLOUR

DOTS_PER_INCH = 130
INCHES = (6.4, 4.0)

Latency = Callable[[ServingFigures], float | None]


def draw_plots(verdict: Verdict) -> dict[str, bytes]:
    """Return the plots as PNG by file name, in the order for a reader; empty if nothing was measured."""
    if not verdict.curve:
        return {}
    return {
        "throughput.png": _png(_throughput, verdict),
        "ratio.png": _png(_ratio, verdict),
        "tpot.png": _png(_tpot, verdict),
        "ttft.png": _png(_ttft, verdict),
    }


def _png(draw: Callable[[Axes, Verdict], None], verdict: Verdict) -> bytes:
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes, verdict)
    _dress(axes, [point.m for point in verdict.curve])
    buffer = io.BytesIO()
    # No Software or date entry: the same verdict gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _throughput(axes: Axes, verdict: Verdict) -> None:
    for label, colour, marker, side in _sides(verdict):
        ms = _ms(verdict, side)
        medians = [figures.output_throughput for figures in side]
        below = [figures.output_throughput - min(figures.repeats) for figures in side]
        above = [max(figures.repeats) - figures.output_throughput for figures in side]
        axes.errorbar(
            ms, medians, yerr=[below, above], label=label, color=colour, marker=marker, capsize=3, lw=1.8
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("output tokens per second")
    axes.set_title("Output throughput (median of repeats; whiskers: slowest and fastest)")
    axes.legend(loc="upper left")


def _ratio(axes: Axes, verdict: Verdict) -> None:
    points = [point for point in verdict.curve if point.ratio is not None]
    floor = verdict.bounds.throughput_floor
    ratios = [point.ratio or 0.0 for point in points]
    drawn = [1.0, floor, *ratios, *(rival.ratio for _, rival in verdict.rivals if rival.ratio is not None)]
    # An interval that is not yet bounded is drawn to the edge of what the others span.
    top = max([*drawn, *(point.ratio_high or 0.0 for point in points)]) * 1.06
    bottom = min([*drawn, *(point.ratio_low or 1.0 for point in points)]) * 0.94
    low = [
        ratio - max(bottom, point.ratio_low or bottom) for ratio, point in zip(ratios, points, strict=True)
    ]
    high = [min(top, point.ratio_high or top) - ratio for ratio, point in zip(ratios, points, strict=True)]
    axes.axhspan(bottom, floor, color=FLOOR_COLOUR, alpha=0.07, lw=0)
    axes.axhline(floor, color=FLOOR_COLOUR, lw=1.4, ls="--", label=f"floor {floor:g}")
    axes.axhline(1.0, color=BASELINE_COLOUR, lw=1.0, label="baseline")
    axes.errorbar(
        [point.m for point in points],
        ratios,
        yerr=[low, high],
        color=ARTIFACT_COLOUR,
        marker="o",
        capsize=4,
        lw=1.8,
        label="artifact, with the interval that decided",
    )
    if verdict.rivals:
        axes.plot(
            [point.m for point, _ in verdict.rivals],
            [float("nan") if rival.ratio is None else rival.ratio for _, rival in verdict.rivals],
            color=RIVAL_COLOUR,
            marker="^",
            lw=1.4,
            label="artifact ÷ rival",
        )
    axes.set_ylim(bottom, top)
    axes.set_ylabel("throughput, artifact ÷ baseline")
    axes.set_title("Throughput ratio")
    axes.legend(loc="best")


def _tpot(axes: Axes, verdict: Verdict) -> None:
    _latency(axes, verdict, lambda side: side.tpot_p50_ms, lambda side: side.tpot_p99_ms)
    axes.set_ylabel("milliseconds")
    axes.set_title("Time per output token after the first (median; dotted: 99th percentile)")


def _ttft(axes: Axes, verdict: Verdict) -> None:
    _latency(axes, verdict, lambda side: side.ttft_p50_ms, lambda side: side.ttft_p99_ms)
    axes.set_ylabel("milliseconds")
    axes.set_title("Time to first token (median; dotted: 99th percentile)")


def _latency(axes: Axes, verdict: Verdict, median: Latency, slowest: Latency) -> None:
    for label, colour, marker, side in _sides(verdict):
        ms = _ms(verdict, side)
        axes.plot(ms, _values(side, median), label=label, color=colour, marker=marker, lw=1.8)
        axes.plot(ms, _values(side, slowest), color=colour, ls=":", lw=1.4)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _sides(verdict: Verdict) -> list[tuple[str, str, str, list[ServingFigures]]]:
    """Return the sides to draw. The artifact comes last, so that it is drawn over the other sides."""
    rival = [point.figures for _, point in verdict.rivals]
    return [
        ("baseline", BASELINE_COLOUR, "s", [point.baseline for point in verdict.curve]),
        *([("rival", RIVAL_COLOUR, "^", rival)] if rival else []),
        ("artifact", ARTIFACT_COLOUR, "o", [point.artifact for point in verdict.curve]),
    ]


def _ms(verdict: Verdict, side: Sequence[ServingFigures]) -> list[int]:
    """Return the Ms of one side's figures; a rival may lack an M that was broken off."""
    points = verdict.curve if len(side) == len(verdict.curve) else [point for point, _ in verdict.rivals]
    return [point.m for point in points]


def _values(side: Sequence[ServingFigures], figure: Latency) -> list[float]:
    return [float("nan") if (value := figure(figures)) is None else value for figures in side]


def _dress(axes: Axes, ms: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ms), [str(m) for m in ms])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("M: requests decoding together")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize(10)
