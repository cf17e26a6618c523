"""Measures everything that a verdict rests on: quality and files in this process, the rest on running
servers.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from ...layouts.choosing.plan import device_model
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.checks.loads import weights_in
from ...serving_check.engine.options import EngineOptions
from ...serving_check.evidence.curve import curve_of
from ...serving_check.evidence.environment import describe_environment
from ...serving_check.evidence.evidence import Evidence, ModelFigures
from ...serving_check.evidence.in_use import FiguresInUse
from ...serving_check.evidence.verdict import Environment, Subject, Verdict
from ...serving_check.gate.gate import RunFigures
from ...serving_check.gate.judge import Judgement, judge
from ...serving_check.gate.policy import weaker
from ...serving_check.gate.unjudged import unjudged_curve
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.kv_cache import kv_cache_of
from .rival import describe_rival
from .run import Run, outlook
from .servers import recorded_options
from .serving import on_all_cores, serve_sides
from .subject import describe_baseline, describe_subject

if TYPE_CHECKING:
    from .findings import Findings, Scores
    from .serving import Results


def measure_and_judge(run: Run) -> Verdict:
    """Serve all sides, compare their answers and files, and judge the figures."""
    run.clock.say(outlook(run))
    results = serve_sides(run, functools.partial(_look, run), functools.partial(_score, run))
    here = device_model(torch.device(run.options.device))
    engines = engine_named(run.asked.engine), engine_named(run.asked.engine_of_baseline)
    served_as_here = [
        engine.packs_with_layouts or device == here
        for engine, device in zip(engines, results.served.packed_on, strict=True)
    ]
    evidence = _evidence(run, results, *served_as_here)
    judgement = judge(evidence, run.workload, run.bounds)
    verdict = _verdict(run, results, evidence, judgement, *served_as_here)
    return replace(verdict, exploratory=tuple(weaker(verdict)))


def _evidence(
    run: Run, results: "Results[Findings, Scores]", artifact_as_here: bool, baseline_as_here: bool
) -> Evidence:
    """Return all figures that checks are made from.

    artifact_as_here, baseline_as_here: whether that side's server packs its layers as this process does
    """
    from .explain import explainer

    figures, served, scores = results.findings.figures, results.served, results.scores
    explain = explainer(run, figures.loaded.layouts if artifact_as_here else {})
    curve = unjudged_curve(curve_of(served.measured, run.workload, run.bounds), served.emulated)
    return Evidence(
        loaded=_as_served(figures.loaded, artifact_as_here, run.artifact),
        baseline_loaded=_as_served(figures.baseline_loaded, baseline_as_here, run.baseline),
        quality=figures.comparison,
        quality_by_domain=figures.by_domain,
        quality_of_given=figures.given,
        foreign_domains=results.findings.text.foreign,
        by_layers=figures.by_layers,
        canary=scores.canary,
        baseline_canary=scores.baseline_canary,
        answers=scores.answers,
        repeated=served.repeated,
        together=served.together,
        company=served.company,
        alone=served.alone,
        in_use=_in_use(served, scores),
        at_rest=served.at_rest,
        measured=tuple(served.measured),
        weights=results.findings.weights,
        texts=results.findings.texts,
        readers=results.findings.readers,
        capacity=served.capacity,
        limit=served.limit,
        request_memory=served.request_memory,
        compiled=served.compiled,
        packed=served.packed,
        emulated=served.emulated,
        has_rival=run.rival is not None,
        diagnoses={point.m: explain(point.m) for point in curve if point.is_slow},
    )


def _in_use(served: RunFigures, scores: "Scores") -> FiguresInUse | None:
    """Return the load as in use, with the scores of its answers."""
    return None if served.in_use is None else replace(served.in_use.figures, answers=scores.in_use)


def _verdict(
    run: Run,
    results: "Results[Findings, Scores]",
    evidence: Evidence,
    judgement: Judgement,
    artifact_as_here: bool,
    baseline_as_here: bool,
) -> Verdict:
    figures = results.findings.figures
    kernels, baseline_kernels = results.served.kernels
    return Verdict(
        status=judgement.status,
        artifact=replace(
            _artifact_subject(run, figures.loaded.layouts if artifact_as_here else {}), kernels=kernels
        ),
        baseline=replace(
            _baseline_subject(run, figures.baseline_loaded.layouts if baseline_as_here else {}),
            kernels=baseline_kernels,
        ),
        rival=_rival_subject(run),
        checks=judgement.checks,
        curve=judgement.curve,
        evidence=evidence,
        environment=_environment(run, figures.dtype, figures.baseline_dtype),
        workload=run.workload,
        bounds=run.bounds,
        quality_tokens=figures.comparison.tokens,
        quality_text_sha256=results.findings.text.sha256,
        quality_text=run.text_name,
        given_text_sha256=None if results.findings.given is None else results.findings.given.sha256,
        quality_tokens_asked=run.asked.quality_tokens,
        declared=run.declared,
        exploratory=(),
        speed_not_judged=judgement.speed_not_judged,
        report={},
        command=run.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_seconds=round(run.clock.elapsed, 1),
        seconds_by_part=dict(run.clock.seconds),
        tasks=run.public_tasks,
        scores=results.task_scores,
    )


def _artifact_subject(run: Run, layouts: Mapping[str, str]) -> Subject:
    kv_cache_dtype = _kv_format(run.asked.engine, run.artifact, run.options)
    return replace(describe_subject(run.artifact, run.manifest, layouts), kv_cache_dtype=kv_cache_dtype)


def _baseline_subject(run: Run, layouts: Mapping[str, str]) -> Subject:
    kv_cache_dtype = _kv_format(run.asked.engine_of_baseline, run.baseline, run.baseline_options)
    return replace(describe_baseline(run.baseline, layouts), kv_cache_dtype=kv_cache_dtype)


def _rival_subject(run: Run) -> Subject | None:
    if run.rival is None:
        return None
    kv_cache_dtype = _kv_format(run.asked.engine, run.rival, run.baseline_options)
    return replace(describe_rival(run.rival), kv_cache_dtype=kv_cache_dtype)


def _environment(run: Run, dtype: str, baseline_dtype: str) -> Environment:
    engine, baseline_engine = run.asked.engine, run.asked.engine_of_baseline
    return describe_environment(
        run.options.device,
        dtype,
        engine,
        baseline_engine,
        recorded_options(engine, run.artifact, run.served_options, dtype, run.placement),
        recorded_options(baseline_engine, run.baseline, run.baseline_options, baseline_dtype, run.placement),
        _engine_versions(engine, baseline_engine),
    )


def _engine_versions(*engines: str) -> dict[str, dict[str, str]]:
    """Return the versions of the engines that have an environment of their own."""
    found = {engine: dict(engine_named(engine).versions()) for engine in engines}
    return {engine: versions for engine, versions in found.items() if versions}


def _look(run: Run, keep_models: bool) -> "Findings":
    # The libraries of models are imported here while the servers import theirs.
    from .findings import look

    return look(run, keep_models)


def _score(run: Run, findings: "Findings", served: RunFigures) -> "Scores":
    from .findings import score

    # No server is measured any more.
    with on_all_cores():
        return score(run, findings, served)


def _as_served(loaded: ModelFigures, as_here: bool, checkpoint: Checkpoint) -> ModelFigures:
    """Return the model that the server of `checkpoint` must hold: the one that this process loaded, or, on
    another device, the same weights.

    as_here: our own server, whoever started it, on the same model of device as here
    """
    if as_here:
        return loaded
    stored = sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors"))
    packed = None if loaded.packed is None else weights_in(loaded.packed)
    return replace(loaded, packed=None, packed_weights=packed, weight_bytes=stored)


def _kv_format(engine: str, checkpoint: Checkpoint, options: EngineOptions) -> str | None:
    """Return the KV format in which keys and values are served; None for an engine without our KV formats."""
    if not engine_named(engine).packs_with_layouts:
        return None
    return kv_cache_of(checkpoint, options.kv_cache_dtype).kv_format
