"""A verdict as text for a terminal: one line a check, one line an M."""

import textwrap

from ...serving_check.evidence.curve import took_turns
from ...serving_check.evidence.task_scores import TaskScore
from ...serving_check.evidence.verdict import CurvePoint, Environment, Verdict
from ...serving_check.gate.policy import first_lines_of
from .profile_table import ProfileTable, profile_table

MARKS = {"pass": "pass", "fail": "FAIL", "inconclusive": "open", "unknown": "n/a"}
INDENT = 8
NAME_WIDTH = 19
WIDTH = 110


def verdict_table(verdict: Verdict) -> str:
    """Return the checks, with bound and reason if they did not pass; then the curve, then the verdict."""
    said = first_lines_of(verdict)
    lines = [line for said_line in said for line in textwrap.wrap(said_line, WIDTH)]
    for check in verdict.checks:
        lines.append(f"  {MARKS[check.status]:4}  {check.name:<{NAME_WIDTH}} {check.measured}")
        if check.status != "pass":
            lines += _wrapped(f"bound: {check.bound}")
            lines += [line for part in check.reason.splitlines() for line in _wrapped(part)]
    if verdict.curve:
        lines += ["", *_curve(verdict.curve), "", *_servers(verdict.curve)]
    if (profile := profile_table(verdict)) is not None:
        lines += ["", *_profile(profile)]
    if verdict.rivals:
        lines += ["", *_rival(verdict)]
    if verdict.scores:
        lines += ["", *_scores(verdict.scores)]
    lines += ["", f"  the baseline ran in {baseline_dtype(verdict)}; {side_by_side(verdict)}"]
    if verdict.seconds_by_part:
        lines += [f"  time: {_parts(verdict)}"]
    notes = ["exploratory"] if verdict.exploratory else []
    notes += ["speed not judged"] if verdict.speed_not_judged else []
    noted = f" ({', '.join(notes)})" if notes else ""
    lines += [
        "",
        f"{verdict.status.upper()}{noted} after {verdict.duration_seconds:.0f} s: {_summary(verdict)}",
    ]
    return "\n".join(lines)


def _curve(curve: tuple[CurvePoint, ...]) -> list[str]:
    head = (
        f"{'M':>5} {'artifact':>10} {'baseline':>10} {'ratio':>7} {'interval':>16}"
        f" {'TPOT ms':>16} {'TTFT ms':>16}"
    )
    drawn = [str(point.m) for point in curve if point.drawn]
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
            + (", drawn" if point.drawn else "")
        )
    if drawn:
        rows.append(f"  M={', '.join(drawn)} were drawn between the given Ms and sent shorter requests")
    return rows


def _profile(profile: ProfileTable) -> list[str]:
    rows = [f"{'profile ' + profile.name:<16} {'ratio':>7} {'interval':>16}"]
    rows += [f"{name:>16} {ratio:>7} {interval:>16}" for name, ratio, interval in profile.rows]
    return rows + textwrap.wrap(profile.sent, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _rival(verdict: Verdict) -> list[str]:
    """Return the table of the rival. The line of an M that does not count for the verdict has no mark at the
    end.
    """
    rows = [f"{'M':>5} {'artifact':>10} {'rival':>10} {'ratio':>7} {'interval':>16}"]
    for point, rival in verdict.rivals:
        interval = f"{_number(rival.ratio_low, 3)} to {_number(rival.ratio_high, 3)}"
        rows.append(
            f"{point.m:>5} {point.artifact.output_throughput:>10,.0f}"
            f" {rival.figures.output_throughput:>10,.0f} {_number(rival.ratio, 3):>7} {interval:>16}"
            f"  {MARKS[rival.status] if rival.status else ''}".rstrip()
        )
    return rows


def _scores(scores: tuple[TaskScore, ...]) -> list[str]:
    rows = [f"{'task':<24} {'metric':<16} {'artifact':>20} {'baseline':>20}"]
    for score in scores:
        ours = with_error(score.value, score.stderr)
        base = with_error(score.baseline_value, score.baseline_stderr)
        rows.append(f"{score.task:<24} {score.metric:<16} {ours:>20} {base:>20}")
    return rows


def with_error(value: float, stderr: float | None) -> str:
    """Return a value with its standard error, if the error is known: `0.712 ± 0.009`."""
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"


def _servers(curve: tuple[CurvePoint, ...]) -> list[str]:
    """Return the servers' own figures, in which a queue beside an empty KV cache is seen at a glance."""
    names = ("running", "waiting", "KV used %", "preempted", "step ms", "host ms", "GPU idle %")
    rows = [
        f"{'M':>5}" + "".join(f" {name:>13}" for name in names),
        f"{'':5}" + f" {'ours / base':>13}" * len(names),
    ]
    for point in curve:
        ours, base = point.artifact, point.baseline
        cells = (
            _pair(ours.running_mean, base.running_mean),
            _pair(ours.waiting_max, base.waiting_max, 0),
            _pair(_percent(ours.kv_usage_max), _percent(base.kv_usage_max), 0),
            _pair(ours.preemptions, base.preemptions, 0),
            _pair(ours.step_ms, base.step_ms),
            _pair(ours.host_ms, base.host_ms, 2),
            _pair(_percent(ours.device_idle_share), _percent(base.device_idle_share)),
        )
        rows.append(f"{point.m:>5}" + "".join(f" {cell:>13}" for cell in cells))
    return rows


def versions_of(environment: Environment) -> str:
    """Return the versions here, and those in the environments of other engines."""
    found = {"": environment.versions} | {
        f"in the environment of {engine}: ": versions
        for engine, versions in environment.engine_versions.items()
    }
    return "; ".join(
        where + ", ".join(f"{name} {version}" for name, version in versions.items())
        for where, versions in found.items()
    )


def held_out_text(verdict: Verdict) -> str:
    """Return the texts for quality and for prompts."""
    brought = "code, prose, chat and other languages that Scalegate brings"
    return brought if verdict.quality_text is None else f"{brought}; besides, {verdict.quality_text}"


def baseline_dtype(verdict: Verdict) -> str:
    """Return the dtype of the baseline's server, or the run's dtype if the server was not started here."""
    return str((verdict.environment.baseline_engine_options or {}).get("dtype", verdict.environment.dtype))


def side_by_side(verdict: Verdict) -> str:
    """Return a text that says whether the servers ran at the same time."""
    if verdict.evidence.measured and all(took_turns(measured) for measured in verdict.evidence.measured):
        return "the servers did not fit in memory together and took turns"
    return "all servers were up together"


def _parts(verdict: Verdict) -> str:
    return ", ".join(f"{part} {seconds:.0f} s" for part, seconds in verdict.seconds_by_part.items())


def _summary(verdict: Verdict) -> str:
    if verdict.status == "pass" and verdict.speed_not_judged:
        return f"{verdict.artifact.name} passes every check but those of speed"
    if verdict.status == "pass":
        return f"{verdict.artifact.name} keeps up with {verdict.baseline.name} at every M"
    return ", ".join(check.name for check in verdict.failures)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)


def _pair(ours: float | None, base: float | None, digits: int = 1) -> str:
    return f"{_number(ours, digits)} / {_number(base, digits)}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"
