"""The whole way in one call: quantize, layout, validate, push; resumed at the stage where it stopped.

What is done is read off the artifact itself, not off a log: a stage counts as done when its result is there
and belongs to the same model, recipe, device, workload and bytes. Each stage has a command and a file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from ...base.batch_invariance import TUNED, BatchInvariance
from ...base.errors import UserError
from ...base.log import logger
from ...base.option_fields import flag, from_given, takes
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE
from ...serving_check.adapters.placement import PLACEMENT, Placement
from ...serving_check.engine.options import AUTO, SIZED, UNQUANTIZED, EngineOptions
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.policy import Declared, declared_by, weaker_settings
from ...serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings, decoding_is_apart, default_ms
from ..checkpoints.checkpoint import open_checkpoint
from ..machine.tested_stack import warn_if_untested
from ..publishing.examination import examine
from ..publishing.push_result import PushResult
from ..quantization.shards.launch import quantize_on
from ..records.artifact import MANIFEST_NAME, Artifact
from ..records.recipe import Recipe
from ..records.recipe_file import is_recipe, load_recipe
from ..records.signature import require_key
from ..validation.rival import describe_rival, rival_folder
from ..validation.servers import effective_options, gpu_name, placed, refuse_unreached, sized_options
from ..validation.task_scores import public_tasks
from .layout import layout as lay_out
from .push import check_target, push
from .quantize import quantize
from .validate import validate

DEFAULT_WORK = "scalegate-work"


@dataclass(frozen=True)
class ReleaseOptions:
    """What the stages are run with beside the engine's options, under the names that the stages use."""

    revision: str | None = None
    """Of the model, where it is a Hub id."""
    export: str | None = None
    calibration: str | None = None
    overwrite: bool = False
    """Quantize anew where the work folder holds another or an older job."""
    baseline: str | None = None
    baseline_revision: str | None = None
    m: Sequence[int] | None = None
    """None takes `default_ms`."""
    input_len: int | None = None
    """None takes `default_input_len` of the recipe's KV format."""
    output_len: int = WorkloadSettings.output_len
    waves: int = WorkloadSettings.waves
    max_repeats: int = WorkloadSettings.max_blocks
    warmups: int = WorkloadSettings.warmups
    seed: int | None = None
    """Of the prompts; None takes a fresh one."""
    floor: float | None = None
    rival: str | None = None
    """A recipe, whose artifact is made too, or a checkpoint; None takes the recipe's own, if it names one."""
    rival_from_m: float | None = None
    tasks: str | None = None
    """lm-eval's tasks or task files, separated by commas, whose scores the card shows; None for none."""
    engine: str = DEFAULT_ENGINE
    baseline_engine: str | None = None
    text: str | Path | None = None
    quality_tokens: int = QUALITY_TOKENS
    sign: str | Path | None = None
    """An SSH key to sign the verdict with."""
    private: bool = False
    create_pr: bool = False
    to_revision: str | None = None
    """The branch to push to."""


@dataclass(frozen=True)
class Stage:
    name: str
    skipped: bool
    reason: str


@dataclass
class ReleaseResult:
    """push is None where the gate did not pass: nothing was published."""

    artifact: Path
    stages: list[Stage] = field(default_factory=list)
    verdict: Verdict | None = None
    push: PushResult | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": str(self.artifact),
            "stages": [vars(stage) for stage in self.stages],
            "verdict": self.verdict.to_json() if self.verdict else None,
            "push": self.push.to_json() if self.push else None,
        }


@dataclass(frozen=True)
class Asked:
    """One call of `release`, its options sorted."""

    options: ReleaseOptions
    engine: EngineOptions
    placement: Placement
    given: Mapping[str, Any]
    """Those of the engine's options that were given, as `validate` takes them; without the layout, which the
    artifact's plan records."""
    kv_cache: str = UNQUANTIZED
    """The KV format of the recipe."""

    @property
    def devices(self) -> list[str]:
        """The GPUs that are named, which quantize together."""
        return [f"cuda:{one}" for one in self.placement.devices or ()]

    @property
    def device(self) -> str | None:
        """Of what one process does, the first of them; None where it is left open."""
        asked = None if self.engine.device == AUTO else self.engine.device
        return self.devices[0] if self.devices else asked

    @property
    def input_len(self) -> int:
        asked = self.options.input_len
        return default_input_len(self.kv_cache) if asked is None else asked

    @property
    def workload(self) -> WorkloadSettings:
        own = self.options
        return WorkloadSettings(
            tuple(sorted(own.m or default_ms(self.input_len))),
            self.input_len,
            own.output_len,
            own.waves,
            own.max_repeats,
            own.warmups,
            WorkloadSettings.seed if own.seed is None else own.seed,
            decoding_is_apart(self.input_len),
        )


@takes(ReleaseOptions, EngineOptions, Placement, sized=SIZED)
def release(
    model: str | Path,
    recipe: str | Path,
    to: str,
    *,
    work: str | Path = DEFAULT_WORK,
    progress: bool = True,
    **options: Any,
) -> ReleaseResult:
    """Quantize `model` by `recipe` in a folder under `work`, prove that it scales, and publish it to `to`.

    A verdict other than a pass ends it: the result then holds the verdict and no push.

    options: the fields of ReleaseOptions, EngineOptions and Placement; `layout` is recorded in the artifact,
             whatever is measured, and the KV format is always the one that the checkpoint declares
    """
    warn_if_untested()
    asked = sorted_out(options)
    model = str(model)
    chosen = load_recipe(recipe)
    asked = claiming(asked, chosen)
    folder = artifact_folder(work, model, chosen)
    # Asked first: a push that cannot succeed should not be found out after hours of work.
    own = asked.options
    refuse_exploratory(chosen, asked)
    check_target(folder, to, own.private, own.create_pr, own.to_revision)
    result = ReleaseResult(folder)
    _quantize(result, model, recipe, chosen.name, asked, progress)
    _lay_out(result, folder, asked, progress)
    rival = _make_rival(result, model, chosen, asked, progress)
    result.verdict = _validate(result, rival, asked, progress)
    if result.verdict.status != "pass":
        return result
    result.push = push(
        folder,
        to,
        private=own.private,
        create_pr=own.create_pr,
        revision=own.to_revision,
        progress=progress,
    )
    unchanged = result.push.status == "unchanged"
    _note(
        result, "push", unchanged, f"{result.push.url} {'holds it already' if unchanged else 'holds it now'}"
    )
    return result


def artifact_folder(work: str | Path, model: str, recipe: Recipe) -> Path:
    return Path(work).expanduser() / f"{Path(model).name}-{recipe.name}"


def sorted_out(options: Mapping[str, Any]) -> Asked:
    """UserError where the options ask for what cannot be released."""
    names = {one.name for one in fields(ReleaseOptions)}
    for_engine = {name: value for name, value in options.items() if name not in names}
    own = from_given(ReleaseOptions, {name: value for name, value in options.items() if name in names})
    for_placement = {name: for_engine.pop(name) for name in PLACEMENT & for_engine.keys()}
    engine, placement = from_given(EngineOptions, for_engine), from_given(Placement, for_placement)
    if engine.kv_cache_dtype != AUTO:
        raise UserError(
            f"{flag('kv_cache_dtype')} tries a KV format out, and a release is served with the one that its "
            "checkpoint declares; leave it out, or try it with `pipeline validate`"
        )
    given = {name: value for name, value in for_engine.items() if name != "layout"}
    refuse_unreached(given | placement.asked_for(), own.engine, own.baseline_engine or own.engine)
    placed(engine.device, placement)
    for gpu in placement.devices or ():
        gpu_name(gpu)
    if own.sign is not None:
        require_key(Path(own.sign))
    return Asked(own, engine, placement, given)


def claiming(asked: Asked, recipe: Recipe) -> Asked:
    """With the KV format and the batch invariance that the recipe claims. UserError where another one of
    these was asked for, or servers too short for the load."""
    claim, given = recipe.batch_invariance, asked.given.get("batch_invariance")
    if given is not None and given != claim:
        raise UserError(
            f"{flag('batch_invariance')} {given} is not what the recipe claims, {claim}, and a release is "
            f"served as its recipe says; write `batch_invariance: {given}` there, or try it with "
            "`pipeline validate`"
        )
    asked = replace(asked, kv_cache=recipe.kv_cache)
    # `validate` would refuse sizes that do not go together, after hours of work.
    sized_options(asked.given, asked.workload)
    if claim == TUNED:
        return asked
    return replace(
        asked,
        engine=replace(asked.engine, batch_invariance=cast(BatchInvariance, claim)),
        given={**asked.given, "batch_invariance": claim},
    )


def refuse_exploratory(recipe: Recipe, asked: Asked) -> None:
    """UserError where the settings alone make a verdict that would not be published."""
    declared = declared_by(recipe.to_json())
    bounds = asked_bounds(declared, asked.options)
    tokens = asked.options.quality_tokens
    weak = weaker_settings(asked.workload, bounds, tokens, declared, asked.kv_cache)
    if weak:
        raise UserError(
            "this would be an exploratory run, and those are not published:\n  "
            + "\n  ".join(weak)
            + "\nLeave these settings out, lower the policy openly in the recipe (README, "
            '"The release policy"), or use `pipeline validate`'
        )


def asked_bounds(declared: Declared, options: ReleaseOptions) -> Bounds:
    given = {"throughput_floor": options.floor, "max_first_rival_m": options.rival_from_m}
    known = {name: value for name, value in given.items() if value is not None}
    return replace(Bounds.from_recipe(declared), **known)


def _quantize(
    result: ReleaseResult, model: str, recipe: str | Path, name: str, asked: Asked, progress: bool
) -> None:
    artifact, finished = _make(model, recipe, result.artifact, asked, progress, asked.options.export)
    at = f" at {artifact.source_revision}" if artifact.source_revision else ""
    _note(result, "quantize", finished, f"{result.artifact} is {model}{at} by {name}")


def _make_rival(
    result: ReleaseResult, model: str, recipe: Recipe, asked: Asked, progress: bool
) -> str | None:
    """The rival's folder or Hub id; one that is named by a recipe is made as the artifact is."""
    named = asked.options.rival or recipe.rival
    if not named or not is_recipe(named):
        return named or None
    folder = rival_folder(result.artifact.parent, model, named)
    _, finished = _make(model, named, folder, asked, progress)
    _note(result, "rival", finished, f"{folder} is {model} by {named}")
    _lay_out(result, folder, asked, progress)
    return str(folder)


def _make(
    model: str, recipe: str | Path, folder: Path, asked: Asked, progress: bool, export: str | None = None
) -> tuple[Artifact, bool]:
    """The artifact in `folder`, by a process on each GPU that is named, and whether it was there already."""
    options, devices = asked.options, asked.devices
    # A finished artifact is checked against its source, its parameters and its own bytes there, not redone.
    finished = not options.overwrite and (folder / MANIFEST_NAME).is_file()
    calibration = None if options.calibration is None else str(options.calibration)
    overwrite = options.overwrite
    if len(devices) > 1 and not finished:
        given = {"revision": options.revision, "export": export, "calibration": calibration}
        quantize_on(devices, model, str(recipe), folder, overwrite, **given)
        # What they have made is there now, and is checked as one that is found.
        overwrite = False
    artifact = quantize(
        model,
        recipe,
        folder,
        revision=options.revision,
        export=export,
        calibration=calibration,
        device=asked.device,
        overwrite=overwrite,
        progress=progress,
    )
    return artifact, finished


def _lay_out(result: ReleaseResult, folder: Path, asked: Asked, progress: bool) -> None:
    laid_out = lay_out(
        folder,
        ms=asked.workload.ms,
        force=asked.engine.layout if folder == result.artifact else None,
        device=asked.device or AUTO,
        dtype=asked.engine.dtype,
        kv=Artifact.read(folder).kv_cache != UNQUANTIZED,
        contexts=(asked.input_len + asked.options.output_len,),
        progress=progress,
    )
    _note(result, "layout", not laid_out.measured, laid_out.note)


def _validate(result: ReleaseResult, rival: str | None, asked: Asked, progress: bool) -> Verdict:
    options = asked.options
    verdict, why_not = _standing_pass(result.artifact, rival, asked)
    if verdict is not None:
        _note(result, "validate", True, f"a pass of {verdict.created} stands for these bytes and workload")
        return verdict
    verdict = validate(
        result.artifact,
        options.baseline,
        baseline_revision=options.baseline_revision,
        m=options.m,
        engine=options.engine,
        baseline_engine=options.baseline_engine,
        input_len=asked.input_len,
        output_len=options.output_len,
        waves=options.waves,
        max_repeats=options.max_repeats,
        warmups=options.warmups,
        seed=options.seed,
        floor=options.floor,
        rival=rival,
        rival_from_m=options.rival_from_m,
        tasks=options.tasks,
        text=options.text,
        quality_tokens=options.quality_tokens,
        sign=options.sign,
        progress=progress,
        **{**asked.given, **asked.placement.for_servers(2 if rival is None else 3).asked_for()},
    )
    _note(result, "validate", False, f"{verdict.status} ({why_not})")
    return verdict


def _standing_pass(folder: Path, rival: str | None, asked: Asked) -> tuple[Verdict | None, str]:
    """A passing verdict that answers what is asked now, or why there is none."""
    found = examine(folder)
    verdict, manifest, options = found.verdict, found.manifest, asked.options
    if verdict is None or found.broken:
        broken = [finding.name for finding in found.broken]
        return (
            None,
            f"the verdict there does not hold: {', '.join(broken)}" if broken else "there was no verdict",
        )
    seed = verdict.workload.seed if options.seed is None else options.seed
    if verdict.workload != replace(asked.workload, seed=seed):
        return None, "the verdict there was given under another workload"
    if verdict.bounds != asked_bounds(declared_by(manifest.recipe), options):
        return None, "the verdict there was given with other bounds"
    if not _is_beside(verdict, rival):
        return None, "the verdict there was given beside another rival"
    if _text_asked(options) != (verdict.quality_text, verdict.quality_tokens_asked):
        return None, "the verdict there was given on another held-out text"
    if verdict.tasks != public_tasks(options.tasks):
        return None, "the verdict there has the scores of other tasks"
    engines = verdict.environment.engine, verdict.environment.baseline_engine
    if engines != (options.engine, options.baseline_engine or engines[1]):
        return None, "the verdict there was given on another engine"
    if changed := _changed_options(verdict, asked):
        return None, f"the verdict there was given with another {', '.join(map(flag, changed))}"
    if verdict.status != "pass":
        return None, f"the verdict there was {verdict.status}"
    if verdict.exploratory:
        return None, "the verdict there is exploratory"
    if options.sign is not None and found.signature.state == "unsigned":
        return None, "the verdict there is not signed"
    return verdict, ""


def _is_beside(verdict: Verdict, rival: str | None) -> bool:
    """Whether the rival of `verdict`, or that it has none, is what is asked now."""
    if rival is None or verdict.rival is None:
        return rival is None and verdict.rival is None
    return describe_rival(open_checkpoint(rival)).bytes_digest == verdict.rival.bytes_digest


def _text_asked(options: ReleaseOptions) -> tuple[str | None, int]:
    return (None if options.text is None else Path(options.text).name), options.quality_tokens


def _changed_options(verdict: Verdict, asked: Asked) -> list[str]:
    """The engine's options that are asked for otherwise than the verdict records them."""
    recorded = verdict.environment.engine_options
    if recorded is None:
        return []
    recorded_places = {name: value for name, value in recorded.items() if name in PLACEMENT}
    sides = 2 if verdict.rival is None else 3
    # JSON has lists for tuples.
    wanted = json.loads(json.dumps(asked.placement.for_servers(sides).asked_for()))
    if json.loads(json.dumps(recorded_places)) != wanted:
        return sorted(recorded_places.keys() ^ wanted.keys()) or sorted(recorded_places)
    options = sized_options(asked.given, asked.workload)
    if options.device == AUTO:
        options = replace(options, device=str(recorded.get("device", AUTO)))
    return [
        name
        for name, value in effective_options(options).items()
        if name in recorded and value not in (AUTO, recorded[name])
    ]


def _note(result: ReleaseResult, name: str, skipped: bool, reason: str) -> None:
    """Record a stage, and say it at once: the next one may take hours."""
    result.stages.append(Stage(name, skipped, reason))
    logger.info(f"{name}: {'done before, skipped; ' if skipped else ''}{reason}")
