"""Output throughput at every M, artifact over baseline: the check that the gate exists for.

`statistics/decide.py` decides; this file puts the decision into words and names the layer to blame.
"""

from collections.abc import Mapping, Sequence

from ..evidence.verdict import CheckResult, CurvePoint, Status
from ..statistics.decide import GROUP, LEAST_FOR_GROUPS, LOOKS, STRONG, TURN_LOOKS, WIDEST, WIDEST_IF_FASTER

NAME = "throughput"
HOPELESS_SENTENCE = "It is so far below the floor that two blocks of repeats were enough. "
RUNS_TO_MISS = 150
"""In at most one of this many runs does a drawn M pass at which tokens take twice as long. A drawn M passes
if its estimate reaches the floor and its 95% interval spans at most `WIDEST`, or `WIDEST_IF_FASTER` if all of
it is above 1. If prompts take up to 30% of the time, the estimate would have to be wrong by 2.2 times half of
the narrower interval, or by 2.3 times half of the wider one. By Student's t, summed over all looks, this
happens in 1 of 210 runs, or in 1 of 184 if servers take turns."""
MORE_REPEATS = "or with more repeats (--max-blocks) or longer ones (--output-len)"


def check_throughput(
    curve: Sequence[CurvePoint],
    floor: float,
    diagnoses: Mapping[int, str],
    max_blocks: int,
    broken_off: int | None = None,
    in_turns: bool = False,
) -> CheckResult:
    """Fail if any M is below `floor` with confidence, pass if every M is at or above it with confidence.

    diagnoses:  for each M that failed, the slow layer
    broken_off: the M at which a request failed, which ends the measurement
    in_turns:   whether no two servers were up together
    """
    failed = [point for point in curve if point.status == "fail"]
    open_points = [point for point in curve if point.status == "inconclusive"]
    status: Status = "fail" if failed else "inconclusive" if open_points or not curve else "pass"
    worst = min(curve, key=lambda point: point.ratio or 0.0, default=None)
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"lowest {_ratio(worst)} at {_name(worst)}" if worst else "nothing",
        bound=(
            f"at least {floor:.2f} of the baseline's output tok/s at every M, known to within {WIDEST:g}×, "
            f"or {WIDEST_IF_FASTER:g}× if surely faster (95%)"
            + ("; by estimate at drawn Ms" if any(point.drawn for point in curve) else "")
        ),
        reason=_reason(curve, floor, diagnoses, max_blocks, broken_off, in_turns),
        figures=_figures(curve),
    )


def _figures(curve: Sequence[CurvePoint]) -> dict[str, float | int | str | None]:
    figures: dict[str, float | int | str | None] = {f"ratio_m{point.m}": point.ratio for point in curve}
    return figures | {f"width_m{point.m}": _width(point) for point in curve}


def _name(point: CurvePoint) -> str:
    return f"M={point.m} (drawn)" if point.drawn else f"M={point.m}"


def _width(point: CurvePoint) -> float | None:
    """Return the upper limit of the 95% interval divided by the lower one."""
    return point.ratio_high / point.ratio_low if point.ratio_low and point.ratio_high else None


def _ratio(point: CurvePoint) -> str:
    if point.ratio is None:
        return "no ratio"
    low = "?" if point.ratio_low is None else f"{point.ratio_low:.3f}"
    high = "?" if point.ratio_high is None else f"{point.ratio_high:.3f}"
    return f"{point.ratio:.3f} [{low}, {high}]"


def _limits(point: CurvePoint) -> str:
    """Return the limits that the decision was made with."""
    high = "any" if point.decision_high is None else f"{point.decision_high:.3f}"
    return f"{point.decision_low or 0:.3f} to {high}"


def _reason(
    curve: Sequence[CurvePoint],
    floor: float,
    diagnoses: Mapping[int, str],
    max_blocks: int,
    broken_off: int | None,
    in_turns: bool,
) -> str:
    failed = [point for point in curve if point.status == "fail"]
    open_points = [point for point in curve if point.status == "inconclusive"]
    if failed:
        lines = [
            f"at {_name(point)}: {point.artifact.output_throughput:.0f} tok/s against the baseline's "
            f"{point.baseline.output_throughput:.0f}, ratio {_ratio(point)}. "
            + (HOPELESS_SENTENCE if len(point.log_ratios) < LOOKS[0] else "")
            + diagnoses.get(point.m, "")
            for point in failed
        ]
        return "\n".join(line.strip() for line in lines)
    if broken_off is not None:
        return f"measuring stopped early because a request failed at M={broken_off}"
    if open_points:
        ms = ", ".join(
            f"{_name(point)} ({point.ratio or 0:.3f}, limits {_limits(point)}{_obstacle(point, floor)})"
            for point in open_points
        )
        blocks = min(max_blocks, max(len(point.log_ratios) for point in open_points))
        within, remedy = _in_turns(blocks) if in_turns else (f"{blocks} blocks of repeats", MORE_REPEATS)
        return (
            f"could not be decided within {within}: {ms}. Validate again on a quieter machine, {remedy}."
            + _of_correlation(open_points, max_blocks, in_turns)
        )
    if not curve:
        return "no block of repeats was finished"
    given = [point for point in curve if not point.drawn]
    widest = max(given or curve, key=lambda point: _width(point) or 0.0)
    return (
        "every ratio is at or above the floor with confidence; the widest 95% interval spans "
        f"{_width(widest) or 1:.2f}×, at M={widest.m}" + _of_drawn(curve)
    )


def _of_drawn(curve: Sequence[CurvePoint]) -> str:
    """Return a sentence on the Ms drawn between the given ones, and how well they are known."""
    drawn = [point for point in curve if point.drawn]
    if not drawn:
        return ""
    widest = max(_width(point) or 1.0 for point in drawn)
    return (
        f". M={', '.join(str(point.m) for point in drawn)} were drawn between the given Ms and sent shorter "
        f"requests, so their ratios are known less well, to within {widest:.2f}×. If tokens took twice as "
        f"long at one of them, it would pass in at most 1 of {RUNS_TO_MISS} runs"
    )


def _of_correlation(open_points: Sequence[CurvePoint], max_blocks: int, in_turns: bool) -> str:
    """Return a sentence on a remedy against strong correlation; empty if there is none."""
    strongest = max(point.correlation for point in open_points)
    if strongest < STRONG:
        return ""
    if in_turns:
        return (
            " The machine itself speeds up and slows down from group to group: what would decide is a "
            "machine or a GPU that nobody else uses."
        )
    if max_blocks < LEAST_FOR_GROUPS:
        return (
            " While one block resembles the next, more of them on the same servers say little: what would "
            f"decide is --max-blocks {LEAST_FOR_GROUPS} or more, with which servers are restarted for each "
            f"group of {GROUP} blocks, or longer repeats (--output-len)."
        )
    return (
        " While one block resembles the next, more of them say little: what would decide are longer repeats "
        "(--output-len, --waves), over which the machine's moods average out, or cores and a GPU that nobody "
        "else uses."
    )


def _in_turns(blocks: int) -> tuple[str, str]:
    """Return a sentence on the figures of servers that took turns, and how to measure more."""
    more = " or more repeats (--max-blocks)" if blocks < TURN_LOOKS[-1] * GROUP else ""
    return (
        f"{blocks // GROUP} groups of {GROUP} blocks, each on restarted servers",
        f"with longer repeats (--output-len){more}, or on GPUs that hold all servers at once (--devices)",
    )


def _obstacle(point: CurvePoint, floor: float) -> str:
    """Return the reason why it was not decided, if that is more than noise near the floor."""
    if point.correlation >= STRONG:
        return f", consecutive blocks are correlated, up to {point.correlation:.2f}"
    return ", interval too wide" if (point.decision_low or 0.0) >= floor else ""
