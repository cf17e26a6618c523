"""The rows of the card's tables, as text: the curve, checks, tasks, rival, comparison, sensitivity.

This file escapes names from a checkpoint or a task, and it is the only place where figures of the card are
rounded.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from ...serving_check.evidence.task_scores import TaskScore
from ...serving_check.evidence.verdict import CheckResult, CurvePoint, Verdict
from ...serving_check.settings import Bounds
from ..records.artifact import Artifact
from ..records.comparison import COLUMNS, read_comparison
from ..records.sensitivity_table import shown
from ..report.table import with_error
from .card_phrases import UNKNOWN
from .markdown import plain


def comparison_table(folder: Path, artifact: Artifact) -> dict[str, Any] | None:
    """Return the table of `pipeline compare --card`; None if it never ran, or ran on other bytes."""
    comparison = read_comparison(folder, artifact.bytes_digest())
    if comparison is None:
        return None
    return {
        "tokens": f"{comparison.tokens:,}",
        "baseline": comparison.baseline,
        "columns": ["model", *COLUMNS[1:]],
        "rows": [[plain(cell) for cell in model.cells] for model in comparison.models],
        "warnings": comparison.warnings,
    }


def sensitivity_table(artifact: Artifact) -> dict[str, Any] | None:
    """Return the choice under a budget, and the cost of each group of layers; None if there was no budget."""
    table = shown(artifact.quantization)
    return table and table | {"rows": [[plain(cell) for cell in row] for row in table["rows"]]}


def rival_table(verdict: Verdict) -> dict[str, Any] | None:
    """Return the rival's name and its ratios; None if there was no rival."""
    if verdict.rival is None:
        return None
    rows = [
        [
            str(point.m),
            f"{point.artifact.output_throughput:,.0f}",
            f"{rival.figures.output_throughput:,.0f}",
            _number(rival.ratio, 2),
            _interval(rival.ratio_low, rival.ratio_high),
        ]
        for point, rival in verdict.rivals
    ]
    name, quantization = verdict.rival.name, verdict.rival.quantization
    from_m = f"{verdict.bounds.max_first_rival_m:g}"
    return {"name": name, "quantization": quantization, "from_m": from_m, "rows": rows}


def score_row(score: TaskScore) -> list[str]:
    texts = (
        score.task,
        score.metric,
        str(score.samples or UNKNOWN),
        with_error(score.value, score.stderr),
        with_error(score.baseline_value, score.baseline_stderr),
    )
    return [plain(text) for text in texts]


def _interval(low: float | None, high: float | None) -> str:
    return UNKNOWN if low is None or high is None else f"{low:.2f} to {high:.2f}"


def curve_row(point: CurvePoint) -> list[str]:
    return [
        f"{point.m} (drawn)" if point.drawn else str(point.m),
        f"{point.artifact.output_throughput:,.0f}",
        f"{point.baseline.output_throughput:,.0f}",
        _number(point.ratio, 2),
        _interval(point.ratio_low, point.ratio_high),
        _number(point.artifact.tpot_p50_ms, 1),
        _number(point.baseline.tpot_p50_ms, 1),
        _number(point.artifact.ttft_p50_ms, 0),
        _number(point.baseline.ttft_p50_ms, 0),
    ]


def changed_bounds(bounds: Bounds) -> list[str]:
    """Return each bound that differs from its default, with the default."""
    defaults = Bounds()
    return [
        f"{field.name.replace('_', ' ')}: {getattr(bounds, field.name):g} "
        f"(the default is {getattr(defaults, field.name):g})"
        for field in fields(Bounds)
        if getattr(bounds, field.name) != getattr(defaults, field.name)
    ]


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def check_row(check: CheckResult) -> list[str]:
    return [plain(text) for text in (check.name, check.measured, check.bound, check.status)]
