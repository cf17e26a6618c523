"""Proves, or refuses, that an artifact serves as fast as its baseline, and writes the verdict down.

The arguments are checked here; `validation/` measures, `serving_check/` decides.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ...base.batch_invariance import TUNED, BatchInvariance
from ...base.errors import UserError
from ...base.option_fields import from_given, given_of, takes
from ...base.stage_clock import StageClock
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import AUTO, SIZED, EngineOptions
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.settings import Bounds, WorkloadSettings
from ..checkpoints.baseline import open_baseline
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..machine.tested_stack import warn_if_untested
from ..model_loader.contradictions import refuse_contradictions
from ..records.artifact import REPORT_FOLDER, Artifact
from ..records.signature import require_key
from ..validation.cpu_dtype import baseline_dtype
from ..validation.measure import measure_and_judge
from ..validation.options import ValidateOptions, asked_bounds, asked_workload
from ..validation.rival import open_rival
from ..validation.run import Run, require_context, say_exploratory, weaker_than_policy
from ..validation.servers import (
    baseline_options,
    placed,
    refuse_unreached,
    sized_options,
    with_long_contexts,
)
from ..validation.task_scores import require_lm_eval, task_context
from ..validation.write_down import Place, write_down

FRESH_SEEDS = 2**31


@takes(ValidateOptions, WorkloadSettings, Bounds, EngineOptions, Placement, sized=SIZED)
def validate(
    artifact: str | Path,
    baseline: str | Path | None = None,
    *,
    revision: str | None = None,
    report: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Verdict:
    """Serve `artifact` and its baseline side by side at every M, run every check, and decide.

    artifact: a folder or a Hub id, in any convention that we read
    revision: branch, tag or commit of `artifact`, if it is a Hub id
    report:   folder for the verdict, the page and the plots, besides the artifact's own
    options:  listed below. Servers are as large as the workload needs unless their sizes are given. `layout`,
              `kv_cache_dtype` and `batch_invariance` are tried on the artifact alone, which then keeps its
              old verdict
    """
    warn_if_untested()
    run = prepare(artifact, {**options, "baseline": baseline}, revision, progress)
    places = _places(run, Path(artifact), None if report is None else Path(report))
    if run.asked.sign is not None:
        require_key(run.asked.sign)
        if not places:
            raise UserError(
                "this run writes its verdict to no file, so --sign has nothing to sign; name a folder with "
                "--report"
            )
    say_exploratory(run)
    return write_down(measure_and_judge(run), places, run.asked.sign)


def prepare(artifact: str | Path, given: Mapping[str, Any], revision: str | None, progress: bool) -> Run:
    """Return one call's arguments, checked, with the defaults filled in; nothing has been started yet.

    given: options of `validate`, by name
    """
    clock = StageClock(progress)
    asked, placement = from_given(ValidateOptions, given), from_given(Placement, given)
    engines = asked.engine, asked.engine_of_baseline
    if asked.tasks is not None:
        require_lm_eval()
    checkpoint = open_checkpoint(str(artifact), revision)
    manifest = _unchanged_manifest(checkpoint)
    engine_options = _with_claim(given_of(EngineOptions, given), manifest)
    kv_format = kv_cache_of(checkpoint, engine_options.get("kv_cache_dtype", AUTO)).kv_format
    stated = None if manifest is None else manifest.recipe.get("profile")
    workload = asked_workload(given, default_input_len(kv_format), secrets.randbelow(FRESH_SEEDS), stated)
    refuse_unreached(engine_options | given_of(Placement, given), *engines)
    baseline = open_baseline(checkpoint, asked.baseline, asked.baseline_revision)
    rival = open_rival(checkpoint, manifest, asked.rival, asked.rival_revision)
    if rival is not None and not engine_named(asked.engine).starts:
        raise UserError(
            f"a rival needs an engine that Scalegate starts, not the running server {asked.engine}"
        )
    for each in (checkpoint, baseline, *([] if rival is None else [rival])):
        refuse_contradictions(each)
    context = _shortest_context([checkpoint, baseline, *([] if rival is None else [rival])], workload)
    longest_task = 0 if asked.tasks is None else task_context(baseline)
    options = sized_options(engine_options, workload, longest_task, context)
    options = replace(options, device=placed(options.device, placement))
    run = Run(
        artifact=checkpoint,
        baseline=baseline,
        rival=rival,
        manifest=manifest,
        workload=workload,
        bounds=asked_bounds(manifest.recipe if manifest else {}, given),
        asked=asked,
        options=options,
        placement=placement,
        baseline_dtype=baseline_dtype(baseline, options, (1, max(workload.ms), workload.input_len)),
        progress=progress,
        clock=clock,
    )
    # An exploratory run is asked for these Ms by name.
    exploratory = bool(weaker_than_policy(run))
    if exploratory:
        run = replace(run, workload=replace(workload, draws_between=False))
    if exploratory and workload.profile is None:
        return run
    served = _least(checkpoint.context_served for checkpoint in run.checkpoints)
    return replace(run, options=with_long_contexts(options, engine_options, served, workload.profile))


def _with_claim(engine_options: dict[str, Any], manifest: Artifact | None) -> dict[str, Any]:
    """Return the engine options with the batch invariance that the artifact claims, unless one was given."""
    claim = _claim(manifest)
    return engine_options if claim == TUNED else {"batch_invariance": claim} | engine_options


def _claim(manifest: Artifact | None) -> BatchInvariance:
    return TUNED if manifest is None else cast(BatchInvariance, manifest.batch_invariance())


def _shortest_context(checkpoints: Sequence[Checkpoint], workload: WorkloadSettings) -> int | None:
    """Return the shortest context in tokens; None if no checkpoint declares one. Raise UserError if the
    workload does not fit in a checkpoint's context.
    """
    for checkpoint in checkpoints:
        require_context(checkpoint, workload)
    return _least(each.context for each in checkpoints)


def _least(contexts: Iterable[int | None]) -> int | None:
    return min((context for context in contexts if context is not None), default=None)


def _places(run: Run, asked: Path, report: Path | None) -> list[Place]:
    """Return the folders that the verdict is written to.

    A Hub id's snapshot is left out, since it belongs to the Hub's cache; so is an artifact that was served
    with a layout, KV format or batch invariance forced by this run.
    """
    as_made = replace(baseline_options(run.options), batch_invariance=_claim(run.manifest))
    folder, places = run.artifact.folder, []
    if run.manifest is not None and run.options == as_made and asked.expanduser().is_dir():
        places.append(Place("the artifact", folder, folder / REPORT_FOLDER, run.manifest))
    if report is not None:
        places.append(Place("the report", report, report))
    return places


def _unchanged_manifest(checkpoint: Checkpoint) -> Artifact | None:
    """Return the artifact's manifest; None for a checkpoint that is not ours. Raise UserError if the
    artifact's bytes changed.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        return None
    changed = manifest.changed_files(checkpoint.folder)
    if changed:
        raise UserError(
            f"the files of {checkpoint.folder} are not the quantized ones:\n  "
            + "\n  ".join(changed[:10])
            + "\nRestore these files, or quantize again."
        )
    return manifest
