"""All that a verdict stands on, measured: quality and files in this process, the rest on running servers."""

import functools
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from ...layouts.choosing.plan import device_model
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.engine import Engine
from ...serving_check.checks.loads import weights_in
from ...serving_check.engine.options import EngineOptions
from ...serving_check.evidence.curve import curve_of
from ...serving_check.evidence.environment import describe_environment
from ...serving_check.evidence.evidence import Evidence, ModelFigures
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.gate import RunFigures
from ...serving_check.gate.judge import judge
from ...serving_check.gate.policy import weaker
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.kv_cache import kv_cache_of
from .rival import describe_rival
from .run import Run, outlook
from .servers import recorded_options
from .serving import serve_sides
from .subject import describe_subject

if TYPE_CHECKING:
    from .looking import Looked, Scores


def measure_and_judge(run: Run) -> Verdict:
    """Serve all sides, look at what they answer and at their files, and judge it."""
    run.clock.say(outlook(run))
    looked, served, scores, written = serve_sides(
        run, functools.partial(_look, run), functools.partial(_score, run)
    )
    from .explain import explainer

    figures = looked.figures
    ours, theirs = engine_named(run.engine), engine_named(run.baseline_engine)
    here = device_model(torch.device(run.options.device))
    ours_here, theirs_here = (
        engine.packs_with_layouts or device == here
        for engine, device in zip((ours, theirs), served.packed_on, strict=True)
    )
    used = figures.loaded.layouts if ours_here else {}
    explain = explainer(run, used)
    curve = curve_of(served.measured, run.workload, run.bounds)
    evidence = Evidence(
        loaded=_as_served(figures.loaded, ours_here, run.artifact),
        baseline_loaded=_as_served(figures.baseline_loaded, theirs_here, run.baseline),
        quality=figures.comparison,
        by_layers=figures.by_layers,
        canary=written.canary,
        baseline_canary=written.baseline_canary,
        answers=written.answers,
        repeated=served.repeated,
        together=served.together,
        company=served.company,
        measured=tuple(served.measured),
        weights=looked.weights,
        texts=looked.texts,
        capacity=served.capacity,
        limit=served.limit,
        compiled=served.compiled,
        packed=served.packed,
        has_rival=run.rival is not None,
        diagnoses={point.m: explain(point.m) for point in curve if point.is_slow},
    )
    judgement = judge(evidence, run.workload, run.bounds)
    baseline_layouts = figures.baseline_loaded.layouts if theirs_here else {}
    asked = run.baseline_options
    verdict = Verdict(
        status=judgement.status,
        artifact=replace(
            describe_subject(run.artifact, run.manifest, used),
            kv_cache_dtype=_kv_format(ours, run.artifact, run.options),
        ),
        baseline=replace(
            describe_subject(run.baseline, None, baseline_layouts),
            kv_cache_dtype=_kv_format(theirs, run.baseline, asked),
        ),
        rival=None
        if run.rival is None
        else replace(describe_rival(run.rival), kv_cache_dtype=_kv_format(ours, run.rival, asked)),
        checks=judgement.checks,
        curve=judgement.curve,
        evidence=evidence,
        environment=describe_environment(
            run.options.device,
            figures.dtype,
            run.engine,
            run.baseline_engine,
            recorded_options(run.engine, run.artifact, run.served_options, figures.dtype, run.placement),
            recorded_options(run.baseline_engine, run.baseline, asked, figures.baseline_dtype, run.placement),
        ),
        workload=run.workload,
        bounds=run.bounds,
        quality_tokens=figures.comparison.tokens,
        quality_text_sha256=looked.text.sha256,
        quality_text=run.text.name if run.text else None,
        quality_tokens_asked=run.quality_tokens,
        declared=run.declared,
        exploratory=(),
        report={},
        command=run.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_seconds=round(run.clock.elapsed, 1),
        seconds_by_part=dict(run.clock.seconds),
        tasks=run.public_tasks,
        scores=scores,
    )
    return replace(verdict, exploratory=tuple(weaker(verdict)))


def _look(run: Run, keep_models: bool) -> "Looked":
    # The libraries of models are imported here while the servers import theirs.
    from .looking import look

    return look(run, keep_models)


def _score(run: Run, looked: "Looked", served: RunFigures) -> "Scores":
    from .looking import score

    return score(run, looked, served)


def _as_served(loaded: ModelFigures, as_here: bool, checkpoint: Checkpoint) -> ModelFigures:
    """What the server of `checkpoint` has to hold: what this process loaded, or, elsewhere, the same weights.

    as_here: our own server, whoever started it, on a device of the model that is used here
    """
    if as_here:
        return loaded
    stored = sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors"))
    packed = None if loaded.packed is None else weights_in(loaded.packed)
    return replace(loaded, packed=None, packed_weights=packed, weight_bytes=stored)


def _kv_format(engine: Engine, checkpoint: Checkpoint, options: EngineOptions) -> str | None:
    return kv_cache_of(checkpoint, options.kv_cache_dtype).kv_format if engine.packs_with_layouts else None
