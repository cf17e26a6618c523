"""Writes a verdict's report: a self-contained HTML page and the plots as PNG files beside it."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from ...base.atomic_files import atomic_path
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.policy import first_lines_of
from .badge import draw_badge
from .curve_picture import asked_ms, draw_curve
from .curves import curves_of
from .headline import headline_of
from .names import BADGE_NAME, PAGE_NAME, PLOT_TITLES, RATIO_NAME
from .plots import draw_plots
from .profile_table import profile_table
from .table import baseline_dtype, held_out_text, side_by_side, versions_of, with_error

TEMPLATE = Path(__file__).parent / "page.html.j2"
STYLE = Path(__file__).parent / "page.css"
CURVES_SCRIPT = Path(__file__).parent / "curves.js"
WIDE, NARROW = (760, 380), (360, 300)
"""The curve's size in pixels on a wide and on a narrow screen; its text has the same size on both."""
TEXTS_SHOWN = 6


def render_report(verdict: Verdict, sensitivity: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return `report.html`, the plots and the badge, by file name.

    sensitivity: the result of `sensitivity_table.shown` for the artifact, if it has a table
    """
    plots = draw_plots(verdict)
    page = render_page(verdict, plots, sensitivity).encode()
    return {**plots, PAGE_NAME: page, BADGE_NAME: draw_badge(verdict).encode()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each of `files` into `folder`, atomically; other files there are left alone."""
    for name, content in files.items():
        with atomic_path(folder / name) as partial:
            partial.write_bytes(content)


def render_page(
    verdict: Verdict, plots: dict[str, bytes], sensitivity: Mapping[str, Any] | None = None
) -> str:
    """Return the page, with the plots inside it, so that it can be sent about as one file."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    images = [
        {"title": PLOT_TITLES[name], "uri": "data:image/png;base64," + base64.b64encode(content).decode()}
        for name, content in plots.items()
        if name != RATIO_NAME
    ]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    script = CURVES_SCRIPT.read_text(encoding="utf-8")
    return template.render(
        verdict=verdict,
        headline=headline_of(verdict),
        with_error=with_error,
        wide_curve=draw_curve(verdict, *WIDE, kind="wide"),
        narrow_curve=draw_curve(verdict, *NARROW, kind="narrow"),
        profile=profile_table(verdict),
        unmeasured=_unmeasured(verdict),
        texts_shown=TEXTS_SHOWN,
        texts=list(zip(verdict.evidence.canary, verdict.evidence.baseline_canary, strict=False)),
        style=STYLE.read_text(encoding="utf-8"),
        curves=curves_of(verdict),
        curves_script=script,
        script_digest=_script_digest(script),
        images=images,
        sensitivity=sensitivity,
        settings=_settings(verdict),
        first_lines=first_lines_of(verdict),
        raw=json.dumps(_without_evidence(verdict), indent=2, ensure_ascii=False),
    )


def _unmeasured(verdict: Verdict) -> list[int]:
    """Return the Ms that the gate did not measure because another M had decided the result."""
    measured = {point.m for point in verdict.curve if point.ratio is not None}
    return [m for m in asked_ms(verdict) if m not in measured]


def _script_digest(script: str) -> str:
    """Return the digest by which the browser recognizes the page's own script, and runs no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _without_evidence(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for the page, without the raw figures, which are long, and without the report's
    digests.
    """
    return {name: v for name, v in verdict.to_json().items() if name not in ("evidence", "report")}


def _settings(verdict: Verdict) -> list[tuple[str, str]]:
    environment, workload = verdict.environment, verdict.workload
    engine = environment.engine
    if environment.baseline_engine != engine:
        engine += f" (baseline: {environment.baseline_engine})"
    return [
        ("Device", f"{environment.device}; {environment.cpu_count} CPUs; {environment.platform}"),
        ("Engine", f"{engine}, {environment.dtype}; the baseline in {baseline_dtype(verdict)}"),
        ("Servers", side_by_side(verdict)),
        ("Versions", versions_of(environment)),
        (
            "Workload",
            f"closed loop, {workload.input_len} tokens in, {workload.output_len} out, "
            f"{workload.waves} wave(s) a repeat, at most {workload.max_blocks} blocks of two repeats at one "
            f"M, seed {workload.seed}",
        ),
        (
            "Held-out text",
            f"{held_out_text(verdict)}, for quality and prompts: "
            f"{verdict.quality_tokens:,} tokens, sha256 {verdict.quality_text_sha256[:16]}…",
        ),
        ("Artifact bytes", f"sha256 {verdict.artifact.bytes_digest}"),
        ("Layout plan", f"sha256 {verdict.artifact.layout_plan_sha256 or 'none'}"),
        ("Layouts", ", ".join(f"{n} × {name}" for name, n in verdict.artifact.layouts.items()) or "none"),
        *([("Kernels in its log", "; ".join(verdict.artifact.kernels))] if verdict.artifact.kernels else []),
        ("Baseline bytes", f"sha256 {verdict.baseline.bytes_digest}"),
        ("Measured", f"{verdict.created}, in {verdict.duration_seconds:.0f} s"),
        ("Of that", ", ".join(f"{part} {taken:.1f} s" for part, taken in verdict.seconds_by_part.items())),
    ]
