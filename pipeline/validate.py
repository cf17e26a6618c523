"""Proves, or refuses, that an artifact serves as fast as its baseline, and writes the verdict down.

The order of the work is here; what is measured and decided is `serving_check/`.
"""

import contextlib
import functools
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ..layouts.choose import choose
from ..layouts.errors import UserError
from ..layouts.plan import LayoutPlan
from ..serving_check.artifact_figures import TextFigures, WeightFigures
from ..serving_check.checks.canary import scored
from ..serving_check.checks.diagnosis import Diagnosis, diagnose
from ..serving_check.checks.loads import weights_in
from ..serving_check.curve import curve_of
from ..serving_check.engine.options import SIZED, UNQUANTIZED, EngineOptions
from ..serving_check.engines.all_engines import DEFAULT_ENGINE, engine_named
from ..serving_check.engines.engine import Engine
from ..serving_check.engines.starting import restart, starting
from ..serving_check.engines.subprocess_endpoint import SubprocessEndpoint
from ..serving_check.environment import describe_environment
from ..serving_check.evidence import Evidence, Loaded
from ..serving_check.gate import CANARY_LENGTH, CANARY_PROMPT, Served, serve_and_measure
from ..serving_check.interleaving import Rival
from ..serving_check.judge import judge
from ..serving_check.options import flag, takes, words_of
from ..serving_check.policy import declared_by, first_lines, weaker, weaker_settings
from ..serving_check.record import parse_verdict
from ..serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings
from ..serving_check.stage_clock import StageClock, in_words
from ..serving_check.statistics import LOOKS
from ..serving_check.verdict import Verdict
from .artifact import MANIFEST_NAME, REPORT_FOLDER, VERDICT_NAME, Artifact
from .checkpoints.baseline import open_baseline
from .checkpoints.checkpoint import Checkpoint, open_checkpoint
from .conventions.kv_cache import kv_cache_of
from .device import resolve_device, resolve_dtype
from .model_loader.load_model import problems
from .signature import require_key
from .validation.cpu_dtype import baseline_dtype
from .validation.in_process import (
    HeldOutText,
    InProcessFigures,
    LoadOptions,
    TextScorer,
    read_held_out,
    take_figures,
)
from .validation.rival import describe_rival, open_rival
from .validation.servers import (
    IN_PROCESS,
    baseline_options,
    has_room,
    recorded_options,
    refuse_unreached,
    server_of,
    sized_options,
)
from .validation.subject import describe_subject
from .validation.text_files import compare_text_files
from .validation.weights import compare_weights
from .validation.write_down import Place, write_down

FRESH_SEEDS = 2**31
Looked = TypeVar("Looked")


@dataclass(frozen=True)
class _Run:
    """One call of `validate`, its arguments checked and its defaults filled in."""

    artifact: Checkpoint
    baseline: Checkpoint
    rival: Checkpoint | None
    manifest: Artifact | None
    """None for a checkpoint that Scalegate did not make."""
    workload: WorkloadSettings
    bounds: Bounds
    engine: str
    baseline_engine: str
    options: EngineOptions
    """The artifact's side."""
    baseline_dtype: str
    text: Path | None
    quality_tokens: int
    progress: bool
    clock: StageClock

    @property
    def baseline_options(self) -> EngineOptions:
        return replace(baseline_options(self.options), dtype=self.baseline_dtype)

    @property
    def declared(self) -> dict[str, float]:
        return declared_by(self.manifest.recipe if self.manifest else {})

    @property
    def in_process(self) -> LoadOptions:
        return LoadOptions(self.options, self.baseline_dtype, self.progress)

    @property
    def command(self) -> str:
        """What measures this again; every setting is spelled out, so that no default can change it.

        It is published with the verdict, so folders and files stand in it by their names alone.
        """
        words = ["pipeline", "validate", self.artifact.public_name, "--baseline", self.baseline.public_name]
        options = {
            "revision": self.artifact.revision,
            "baseline-revision": self.baseline.revision,
            "m": ",".join(map(str, self.workload.ms)),
            "input-len": self.workload.input_len,
            "output-len": self.workload.output_len,
            "waves": self.workload.waves,
            "max-repeats": self.workload.max_blocks,
            "warmups": self.workload.warmups,
            "seed": self.workload.seed,
            "floor": self.bounds.throughput_floor,
            "text": self.text.name if self.text else None,
            "quality-tokens": self.quality_tokens,
            "engine": self.engine,
            "baseline-engine": self.baseline_engine,
        }
        if self.rival is not None:
            options["rival"], options["rival-revision"] = self.rival.public_name, self.rival.revision
            options["rival-from-m"] = f"{self.bounds.max_first_rival_m:g}"
        for name, value in options.items():
            words += [] if value is None else [flag(name), str(value)]
        reach = engine_named(self.engine).options | engine_named(self.baseline_engine).options | IN_PROCESS
        spelled = {name: value for name, value in self.options.to_json().items() if name in reach}
        return shlex.join([*words, *words_of(spelled)])


@takes(EngineOptions, sized=SIZED)
def validate(
    artifact: str | Path,
    baseline: str | Path | None = None,
    *,
    m: Sequence[int] = WorkloadSettings.ms,
    report: str | Path | None = None,
    engine: str = DEFAULT_ENGINE,
    baseline_engine: str | None = None,
    input_len: int = WorkloadSettings.input_len,
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
    sign: str | Path | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> Verdict:
    """Serve `artifact` and `baseline` side by side at every M, run every check, and decide.

    artifact:        folder or Hub id, of any convention we read
    baseline:        what to compare with; None takes the checkpoint that the artifact was made from
    report:          folder for the verdict, the page and the plots, besides those in the artifact itself
    engine:          a name in `ENGINES`, or the URL of a server that is already running
    baseline_engine: the same for the baseline; None takes `engine`, or our own where that is a URL
    max_repeats:     blocks of two interleaved repeats at one M before it is called undecided
    seed:            of the prompts; None takes a fresh one, so that no server can have met them
    floor:           least throughput ratio; None takes the recipe's, or the default
    text:            held-out text (plain, or .jsonl with `text`); None takes the code that Scalegate brings
    rival:           a checkpoint of the same model that `artifact` must be faster than, on the same engine;
                     None takes the one that the recipe names, if it does
    rival_from_m:    the M from which on it must be; None takes the recipe's, or the default
    sign:            an SSH key to sign the verdict with, beside which the signature then lies
    engine_options:  the fields of EngineOptions, for both servers; sizes are the workload's unless given.
                     `layout` and `kv_cache_dtype` are for the artifact alone, to try them: it then keeps its
                     old verdict
    """
    clock = StageClock(progress)
    seed = secrets.randbelow(FRESH_SEEDS) if seed is None else seed
    workload = WorkloadSettings(tuple(sorted(m)), input_len, output_len, waves, max_repeats, warmups, seed)
    options = sized_options(engine_options, workload)
    if baseline_engine is None:
        baseline_engine = engine if engine_named(engine).starts else DEFAULT_ENGINE
    refuse_unreached(engine_options, engine, baseline_engine)
    checkpoint = open_checkpoint(str(artifact), revision)
    manifest = _unchanged_manifest(checkpoint.folder)
    bounds = Bounds.from_recipe(manifest.recipe if manifest else {})
    other = open_baseline(checkpoint, None if baseline is None else str(baseline), baseline_revision)
    options = replace(options, device=resolve_device(options.device))
    given = {"throughput_floor": floor, "max_first_rival_m": rival_from_m}
    bounds = replace(bounds, **{name: value for name, value in given.items() if value is not None})
    third = open_rival(checkpoint, manifest, None if rival is None else str(rival), rival_revision)
    if third is not None and not engine_named(engine).starts:
        raise UserError(f"a rival is served by the artifact's engine, and {engine} is running already")
    run = _Run(
        artifact=checkpoint,
        baseline=other,
        rival=third,
        manifest=manifest,
        workload=workload,
        bounds=bounds,
        engine=engine,
        baseline_engine=baseline_engine,
        options=options,
        baseline_dtype=baseline_dtype(other, options, (1, max(m), input_len)),
        text=None if text is None else Path(text),
        quality_tokens=quality_tokens,
        progress=progress,
        clock=clock,
    )
    key = None if sign is None else Path(sign)
    # A Hub id opens a snapshot in the Hub's own cache, which is not ours to write into; and the artifact will
    # not be served in a layout or a KV format that is forced here.
    as_served = options == baseline_options(options)
    into_artifact = manifest is not None and as_served and Path(artifact).expanduser().is_dir()
    places = [Place("the artifact", checkpoint.folder, checkpoint.folder / REPORT_FOLDER, manifest)]
    places = places if into_artifact else []
    places += [] if report is None else [Place("the report", Path(report), Path(report))]
    if key is not None:
        require_key(key)
        if not places:
            raise UserError("nothing is written here that could be signed; name a folder with --report")
    _say_exploratory(run)
    return write_down(_measure_and_judge(run), places, key)


def _measure_and_judge(run: _Run) -> Verdict:
    _require_context(run.artifact, run.workload)
    _require_context(run.baseline, run.workload)
    if run.rival is not None:
        _require_context(run.rival, run.workload)
    text = read_held_out(run.text, run.artifact, run.baseline, run.quality_tokens)
    clock = run.clock
    clock.say(_outlook(run))

    def look() -> tuple[InProcessFigures, tuple[WeightFigures | None, TextFigures]]:
        with clock.stage("quality"):
            figures = take_figures(run.artifact, run.baseline, text, run.in_process)
        with clock.stage("files"):
            return figures, _look_at_files(run)

    (figures, (weights, texts)), served = _serve(run, text, look)
    ours, theirs = engine_named(run.engine), engine_named(run.baseline_engine)
    used = figures.loaded.layouts if ours.packs_with_layouts else {}
    longest = max(run.workload.input_len + run.workload.output_len, CANARY_PROMPT + CANARY_LENGTH)
    score = TextScorer(run.artifact, run.baseline, run.in_process, longest)
    explain = _explainer(run, used)
    curve = curve_of(served.measured, run.workload, run.bounds)
    evidence = Evidence(
        loaded=_as_served(figures.loaded, ours, run.artifact),
        baseline_loaded=_as_served(figures.baseline_loaded, theirs, run.baseline),
        quality=figures.comparison,
        canary=scored(served.canary, score.baseline_nats),
        baseline_canary=scored(served.baseline_canary, score.baseline_nats),
        answers=tuple(map(score, served.texts)),
        repeated=served.repeated,
        measured=tuple(served.measured),
        weights=weights,
        texts=texts,
        capacity=served.capacity,
        limit=served.limit,
        compiled=served.compiled,
        packed=served.packed,
        has_rival=run.rival is not None,
        diagnoses={point.m: explain(point.m).sentence for point in curve if point.status == "fail"},
    )
    judgement = judge(evidence, run.workload, run.bounds)
    baseline_layouts = figures.baseline_loaded.layouts if theirs.packs_with_layouts else {}
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
            recorded_options(run.engine, run.artifact, run.options, figures.dtype),
            recorded_options(run.baseline_engine, run.baseline, asked, figures.baseline_dtype),
        ),
        workload=run.workload,
        bounds=run.bounds,
        quality_tokens=figures.comparison.tokens,
        quality_text_sha256=text.sha256,
        quality_text=run.text.name if run.text else None,
        quality_tokens_asked=run.quality_tokens,
        declared=run.declared,
        exploratory=(),
        report={},
        command=run.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_seconds=round(clock.elapsed, 1),
        seconds_by_part=dict(clock.seconds),
    )
    return replace(verdict, exploratory=tuple(weaker(verdict)))


def _say_exploratory(run: _Run) -> None:
    """Before hours of work, that its result will not be published; whoever has no manifest never asked to."""
    weak = weaker_settings(run.workload, run.bounds, run.quality_tokens, run.declared)
    for line in first_lines(weak, {}) if run.manifest and run.progress else []:
        print(f"Note: {line}", file=sys.stderr)


def _as_served(loaded: Loaded, engine: Engine, checkpoint: Checkpoint) -> Loaded:
    """Only our own servers, on this machine, load as this process does; others are taken by their files."""
    if engine.packs_with_layouts:
        return loaded
    stored = sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors"))
    packed = None if loaded.packed is None else weights_in(loaded.packed)
    return replace(loaded, packed=None, packed_weights=packed, weight_bytes=stored)


def _kv_format(engine: Engine, checkpoint: Checkpoint, options: EngineOptions) -> str | None:
    return kv_cache_of(checkpoint, options.kv_cache_dtype).kv_format if engine.packs_with_layouts else None


def _look_at_files(run: _Run) -> tuple[WeightFigures | None, TextFigures]:
    """What the artifact's files show, which needs no model: it is looked at while the servers start."""
    kv_cache = kv_cache_of(run.artifact, run.options.kv_cache_dtype)
    weights = compare_weights(
        run.artifact,
        run.baseline,
        run.manifest,
        has_kv_format=kv_cache.kv_format != UNQUANTIZED,
        device=run.options.device,
        progress=run.progress,
    )
    declared = run.manifest.declared_changes() if run.manifest else ()
    return weights, TextFigures(compare_text_files(run.artifact, run.baseline), declared)


def _serve(run: _Run, text: HeldOutText, look: Callable[[], Looked]) -> tuple[Looked, Served]:
    """All servers up at once, measured in turn, and down again whatever happens.

    look: what is done besides, while they start where there is room for it, and before that where not
    """
    logs = Path(tempfile.mkdtemp(prefix="scalegate-logs-"))
    asked = run.baseline_options
    sides = [
        (run.engine, "artifact", run.artifact, run.options),
        (run.baseline_engine, "baseline", run.baseline, asked),
    ]
    if run.rival is not None:
        sides.append((run.engine, "rival", run.rival, baseline_options(run.options)))
    servers = [
        server_of(engine, side, checkpoint.folder, options, logs, run.progress, len(sides))
        for engine, side, checkpoint, options in sides
    ]
    started = [server for server in servers if isinstance(server, SubprocessEndpoint)]
    roomy = has_room([checkpoint for _, _, checkpoint, _ in sides], run.options)
    looked = None if roomy else look()
    with starting(servers, together=roomy) as endpoints:
        looked = look() if looked is None else looked
        with run.clock.stage("waiting for the servers"):
            artifact, baseline, *rivals = endpoints()
        floor = run.bounds.throughput_floor
        served = serve_and_measure(
            artifact,
            baseline,
            run.workload,
            floor,
            text.token_ids,
            text.token_text,
            progress=run.progress,
            clock=run.clock,
            restart=functools.partial(restart, started, roomy) if len(started) == len(servers) else None,
            rival=Rival(rivals[0], run.bounds.max_first_rival_m) if rivals else None,
        )
    # Left behind where a server failed: the error names the log.
    shutil.rmtree(logs)
    return looked, served


def _outlook(run: _Run) -> str:
    """What is to come, before any of it has begun."""
    workload = run.workload
    least = sum(workload.ms) * workload.waves * LOOKS[0]
    text = (
        f"{run.artifact.public_name} against {run.baseline.public_name} in {run.baseline_dtype}: at least "
        f"{least} requests of {workload.input_len} + {workload.output_len} tokens to either server"
    )
    path = run.artifact.folder / VERDICT_NAME
    if run.manifest is not None and path.is_file():
        with contextlib.suppress(UserError):
            text += f"; its last verdict took {in_words(parse_verdict(path).duration_seconds)}"
    return text


def _unchanged_manifest(folder: Path) -> Artifact | None:
    """The artifact's manifest; None for a checkpoint that is not ours. UserError where its bytes changed."""
    if not (folder / MANIFEST_NAME).is_file():
        return None
    manifest = Artifact.read(folder)
    changed = manifest.changed_files(folder)
    if changed:
        raise UserError(
            f"{folder} is not what was quantized:\n  "
            + "\n  ".join(changed[:10])
            + "\nRestore these files, or quantize again."
        )
    return manifest


def _require_context(checkpoint: Checkpoint, workload: WorkloadSettings) -> None:
    text_config = checkpoint.config.get("text_config") or checkpoint.config
    context = text_config.get("max_position_embeddings")
    needed = max(workload.input_len + workload.output_len, CANARY_PROMPT + CANARY_LENGTH)
    if isinstance(context, int) and needed > context:
        raise UserError(
            f"requests of {workload.input_len} + {workload.output_len} tokens (at least {needed}) do not fit "
            f"the {context} tokens of {checkpoint.source}'s context; lower --input-len or --output-len"
        )


def _explainer(run: _Run, used: Mapping[str, str]) -> Callable[[int], Diagnosis]:
    """Explains a slow M from the artifact's plan, or from one measured now where that does not cover it."""
    recorded = run.manifest.layout_plan if run.manifest else None

    @functools.cache
    def plan() -> LayoutPlan:
        to_serve = problems(run.artifact, resolve_dtype(run.options.dtype), run.options.device)
        if recorded and (found := LayoutPlan.from_json(recorded)).covers(to_serve, used):
            return found
        return choose(to_serve, ms=run.workload.ms, progress=run.progress)

    def explain(m: int) -> Diagnosis:
        if not used:
            return Diagnosis("No layer ran in one of Scalegate's layouts, so none of them is to blame.")
        return diagnose(plan(), used, m, run.bounds.throughput_floor)

    return explain
