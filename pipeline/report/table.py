"""A verdict as text for a terminal: one line a check, one line an M."""

import textwrap

from ...serving_check.verdict import CurvePoint, Verdict

MARKS = {"pass": "pass", "fail": "FAIL", "inconclusive": "open"}
INDENT = 8
NAME_WIDTH = 19
WIDTH = 110


def verdict_table(verdict: Verdict) -> str:
    """The checks, with bound and reason where they did not pass; then the curve, then the verdict."""
    lines = []
    for check in verdict.checks:
        lines.append(f"  {MARKS[check.status]:4}  {check.name:<{NAME_WIDTH}} {check.measured}")
        if check.status != "pass":
            lines += _wrapped(f"bound: {check.bound}")
            lines += [line for part in check.reason.splitlines() for line in _wrapped(part)]
    if verdict.curve:
        lines += ["", *_curve(verdict.curve)]
    lines += ["", f"{verdict.status.upper()} after {verdict.duration_seconds:.0f} s: {_summary(verdict)}"]
    return "\n".join(lines)


def _curve(curve: tuple[CurvePoint, ...]) -> list[str]:
    head = (
        f"{'M':>5} {'artifact':>10} {'baseline':>10} {'ratio':>7} {'interval':>16}"
        f" {'TPOT ms':>16} {'TTFT ms':>16}"
    )
    rows = [
        head,
        f"{'':5} {'tok/s':>10} {'tok/s':>10} {'':7} {'':16} {'ours / base':>16} {'ours / base':>16}",
    ]
    for point in curve:
        ours, base = point.artifact, point.baseline
        interval = f"{_number(point.ratio_low, 3)} to {_number(point.ratio_high, 3)}"
        rows.append(
            f"{point.m:>5} {ours.output_throughput:>10,.0f} {base.output_throughput:>10,.0f}"
            f" {_number(point.ratio, 3):>7} {interval:>16}"
            f" {_pair(ours.tpot_p50_ms, base.tpot_p50_ms):>16}"
            f" {_pair(ours.ttft_p50_ms, base.ttft_p50_ms):>16}  {MARKS[point.status]}"
        )
    return rows


def _summary(verdict: Verdict) -> str:
    if verdict.status == "pass":
        return f"{verdict.artifact.name} keeps up with {verdict.baseline.name} at every M"
    return ", ".join(check.name for check in verdict.failures)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)


def _pair(ours: float | None, base: float | None) -> str:
    return f"{_number(ours, 1)} / {_number(base, 1)}"


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"
