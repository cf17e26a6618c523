"""Proves, or refuses, that an artifact serves as fast as its baseline, and writes the verdict down.

Checks what was asked for; the measuring is `validation/`, what is measured and decided `serving_check/`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.batch_invariance import TUNED
from ...base.errors import UserError
from ...base.option_fields import from_given, takes
from ...base.stage_clock import StageClock
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE, engine_named
from ...serving_check.adapters.placement import PLACEMENT, Placement
from ...serving_check.engine.options import AUTO, SIZED, EngineOptions
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings, decoding_is_apart, default_ms
from ..checkpoints.baseline import open_baseline
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..machine.tested_stack import warn_if_untested
from ..records.artifact import REPORT_FOLDER, Artifact
from ..records.signature import require_key
from ..validation.cpu_dtype import baseline_dtype
from ..validation.measure import measure_and_judge
from ..validation.rival import open_rival
from ..validation.run import Run, require_context, say_exploratory
from ..validation.servers import baseline_options, placed, refuse_unreached, sized_options
from ..validation.task_scores import require_lm_eval, task_context
from ..validation.write_down import Place, write_down

FRESH_SEEDS = 2**31


@takes(EngineOptions, Placement, sized=SIZED)
def validate(
    artifact: str | Path,
    baseline: str | Path | None = None,
    *,
    m: Sequence[int] | None = None,
    report: str | Path | None = None,
    engine: str = DEFAULT_ENGINE,
    baseline_engine: str | None = None,
    input_len: int | None = None,
    output_len: int = WorkloadSettings.output_len,
    waves: int = WorkloadSettings.waves,
    max_repeats: int = WorkloadSettings.max_blocks,
    warmups: int = WorkloadSettings.warmups,
    seed: int | None = None,
    floor: float | None = None,
    text: str | Path | None = None,
    quality_tokens: int = QUALITY_TOKENS,
    revision: str | None = None,
    baseline_revision: str | None = None,
    rival: str | Path | None = None,
    rival_revision: str | None = None,
    rival_from_m: float | None = None,
    tasks: str | None = None,
    sign: str | Path | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> Verdict:
    """Serve `artifact` and `baseline` side by side at every M, run every check, and decide.

    artifact:        folder or Hub id, of any convention we read
    baseline:        what to compare with; None takes the checkpoint that the artifact was made from
    m:               numbers of requests at once; None takes `default_ms`
    report:          folder for the verdict, the page and the plots, besides those in the artifact itself
    engine:          a name in `ENGINES`, or the URL of a server that is already running
    baseline_engine: the same for the baseline; None takes `engine`, or our own where that is a URL
    input_len:       prompt tokens a request; None takes `default_input_len` of the KV format
    max_repeats:     blocks of two interleaved repeats at one M before it is called undecided
    seed:            of the prompts; None takes a fresh one, so that no server can have met them
    floor:           least throughput ratio; None takes the recipe's, or the default
    text:            held-out text (plain, or .jsonl with `text`); None takes the code that Scalegate brings
    rival:           a checkpoint of the same model that `artifact` must be faster than, on the same engine;
                     None takes the one that the recipe names, if it does
    rival_from_m:    the M from which on it must be; None takes the recipe's, or the default
    tasks:           lm-eval's tasks or task files, separated by commas; the verdict gets both servers' scores
    sign:            an SSH key to sign the verdict with, beside which the signature then lies
    engine_options:  the fields of EngineOptions and of Placement, for all servers; sizes are the workload's
                     unless given. `layout`, `kv_cache_dtype` and `batch_invariance` are for the artifact
                     alone, to try them: it then keeps its old verdict. None for the last takes the recipe's
    """
    warn_if_untested()
    clock = StageClock(progress)
    seed = secrets.randbelow(FRESH_SEEDS) if seed is None else seed
    if tasks is not None:
        require_lm_eval()
    given_options = dict(engine_options)
    placement = from_given(
        Placement, {name: engine_options.pop(name) for name in PLACEMENT & set(engine_options)}
    )
    if baseline_engine is None:
        baseline_engine = engine if engine_named(engine).starts else DEFAULT_ENGINE
    checkpoint = open_checkpoint(str(artifact), revision)
    manifest = _unchanged_manifest(checkpoint)
    if input_len is None:
        asked_format = engine_options.get("kv_cache_dtype") or AUTO
        input_len = default_input_len(kv_cache_of(checkpoint, asked_format).kv_format)
    ms = tuple(sorted(m or default_ms(input_len)))
    workload = WorkloadSettings(
        ms, input_len, output_len, waves, max_repeats, warmups, seed, decoding_is_apart(input_len)
    )
    claim = TUNED if manifest is None else manifest.batch_invariance()
    if claim != TUNED and engine_options.get("batch_invariance") is None:
        engine_options["batch_invariance"] = given_options["batch_invariance"] = claim
    refuse_unreached(given_options, engine, baseline_engine)
    bounds = Bounds.from_recipe(manifest.recipe if manifest else {})
    other = open_baseline(checkpoint, None if baseline is None else str(baseline), baseline_revision)
    third = open_rival(checkpoint, manifest, None if rival is None else str(rival), rival_revision)
    if third is not None and not engine_named(engine).starts:
        raise UserError(f"a rival is served by the artifact's engine, and {engine} is running already")
    models = [one for one in (checkpoint, other, third) if one is not None]
    for one in models:
        require_context(one, workload)
    context = min((one.context for one in models if one.context is not None), default=None)
    longest_task = 0 if tasks is None else task_context(other)
    options = sized_options(engine_options, workload, longest_task, context)
    options = replace(options, device=placed(options.device, placement))
    given = {"throughput_floor": floor, "max_first_rival_m": rival_from_m}
    bounds = replace(bounds, **{name: value for name, value in given.items() if value is not None})
    run = Run(
        artifact=checkpoint,
        baseline=other,
        rival=third,
        manifest=manifest,
        workload=workload,
        bounds=bounds,
        engine=engine,
        baseline_engine=baseline_engine,
        options=options,
        placement=placement,
        baseline_dtype=baseline_dtype(other, options, (1, max(ms), input_len)),
        text=None if text is None else Path(text),
        quality_tokens=quality_tokens,
        progress=progress,
        clock=clock,
        tasks=tasks,
    )
    key = None if sign is None else Path(sign)
    # A Hub id opens a snapshot in the Hub's own cache, which is not ours to write into; and the artifact will
    # not be served in a layout or a KV format that is forced here.
    as_served = options == replace(baseline_options(options), batch_invariance=claim)
    into_artifact = manifest is not None and as_served and Path(artifact).expanduser().is_dir()
    places = [Place("the artifact", checkpoint.folder, checkpoint.folder / REPORT_FOLDER, manifest)]
    places = places if into_artifact else []
    places += [] if report is None else [Place("the report", Path(report), Path(report))]
    if key is not None:
        require_key(key)
        if not places:
            raise UserError("nothing is written here that could be signed; name a folder with --report")
    say_exploratory(run)
    return write_down(measure_and_judge(run), places, key)


def _unchanged_manifest(checkpoint: Checkpoint) -> Artifact | None:
    """The artifact's manifest; None for a checkpoint that is not ours. UserError where its bytes changed."""
    manifest = checkpoint.manifest
    if manifest is None:
        return None
    changed = manifest.changed_files(checkpoint.folder)
    if changed:
        raise UserError(
            f"{checkpoint.folder} is not what was quantized:\n  "
            + "\n  ".join(changed[:10])
            + "\nRestore these files, or quantize again."
        )
    return manifest
