"""The whole pipeline in one call: quantize, layout, validate, push; continues at the stage where it stopped.

Progress is read from the artifact itself, not from a log: a stage is finished if its result exists and
belongs to the same model, recipe, device, workload and bytes. Each stage has a command and a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...base.log import logger
from ...base.option_fields import name_of, options_of, takes, values_of, words_of
from ...serving_check.engine.options import AUTO, SIZED, UNQUANTIZED
from ...serving_check.evidence.verdict import Verdict
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..machine.tested_stack import warn_if_untested
from ..publishing.push_result import PushResult
from ..quantization.options import QuantizeOptions
from ..quantization.shards.launch import run_on
from ..quantization.shards.ranks import OtherRankFailed
from ..records.artifact import MANIFEST_NAME, Artifact
from ..records.recipe import Recipe
from ..records.recipe_file import is_recipe, load_recipe
from ..validation.rival import rival_folder
from .asked_first import lacking_tools, planned_files, refuse_card, refuse_later, refuse_unread
from .layout import layout as lay_out
from .push import check_target, push
from .quantize import quantize
from .release_request import (
    DEFAULT_WORK,
    FOR_VALIDATE,
    GROUPS,
    ReleaseRequest,
    read_request,
    refuse_exploratory,
    refuse_unserved_source,
)
from .standing_verdict import standing_pass
from .validate import validate


@dataclass(frozen=True)
class Stage:
    name: str
    skipped: bool
    reason: str


@dataclass
class ReleaseResult:
    """The result of a release. `push` is None if the gate did not pass, so nothing was published."""

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


@takes(*GROUPS, sized=SIZED)
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

    A verdict other than a pass ends the release: the result then holds the verdict and no push. A pass that
    did not judge speed also ends the release, unless `allow_unjudged_speed` is given.

    options: listed below. `layout` is recorded in the artifact, whatever is measured; the KV format is always
             the one that the checkpoint declares
    """
    warn_if_untested()
    model = str(model)
    chosen = load_recipe(recipe)
    request = read_request(options, chosen)
    folder = artifact_folder(work, model, chosen)
    # Asked first: a push that cannot succeed should not be found out after hours of work.
    publication = request.publication
    refuse_exploratory(chosen, request)
    check_target(folder, to, publication.private, publication.create_pr, publication.to_revision)
    if request.making.overwrite or not (folder / MANIFEST_NAME).is_file():
        _ask_first(open_checkpoint(model, request.making.revision), chosen, request, folder, to)
    result = ReleaseResult(folder)
    artifact = _quantize(result, model, recipe, chosen.name, request, progress)
    _lay_out(result, folder, artifact, request, progress)
    rival = _make_rival(result, model, chosen, request, progress)
    result.verdict = _validate(result, rival, request, progress)
    unproved = result.verdict.speed_not_judged and not publication.allow_unjudged_speed
    if result.verdict.status != "pass" or unproved:
        return result
    result.push = push(
        folder,
        to,
        private=publication.private,
        create_pr=publication.create_pr,
        revision=publication.to_revision,
        allow_unjudged_speed=publication.allow_unjudged_speed,
        progress=progress,
    )
    is_unchanged = result.push.status == "unchanged"
    holds = "holds it already" if is_unchanged else "holds it now"
    _note(result, "push", is_unchanged, f"{result.push.url} {holds}")
    return result


def _ask_first(source: Checkpoint, recipe: Recipe, request: ReleaseRequest, folder: Path, to: str) -> None:
    """Raise UserError if a later stage cannot succeed, so that the user learns it before hours of
    quantizing.
    """
    refuse_unserved_source(source, request)
    for note in refuse_unread(source, recipe, request):
        logger.info(note)
    if lacking := lacking_tools(request):
        raise UserError("\n".join(lacking))
    for note in refuse_card(source, recipe, to):
        logger.info(note)
    refuse_later(source, request, planned_files(source, recipe, request, folder, to))


def artifact_folder(work: str | Path, model: str, recipe: Recipe) -> Path:
    return Path(work).expanduser() / f"{Path(model).name}-{recipe.name}"


def _quantize(
    result: ReleaseResult,
    model: str,
    recipe: str | Path,
    name: str,
    request: ReleaseRequest,
    progress: bool,
) -> Artifact:
    artifact, finished = _make(model, recipe, result.artifact, request, request.making, progress)
    at = f" at {artifact.source_revision}" if artifact.source_revision else ""
    _note(result, "quantize", finished, f"{result.artifact} is {model}{at} by {name}")
    return artifact


def _make_rival(
    result: ReleaseResult, model: str, recipe: Recipe, request: ReleaseRequest, progress: bool
) -> str | None:
    """Return the rival's folder or Hub id. If the rival is given as a recipe, it is quantized like the
    artifact.
    """
    named = request.validation.rival or recipe.rival
    if not named or not is_recipe(named):
        return named or None
    folder = rival_folder(result.artifact.parent, model, named)
    # Its own recipe says which convention can store it.
    artifact, finished = _make(model, named, folder, request, replace(request.making, export=None), progress)
    _note(result, "rival", finished, f"{folder} is {model} by {named}")
    _lay_out(result, folder, artifact, request, progress)
    return str(folder)


def _make(
    model: str,
    recipe: str | Path,
    folder: Path,
    request: ReleaseRequest,
    options: QuantizeOptions,
    progress: bool,
) -> tuple[Artifact, bool]:
    """Return the artifact in `folder`, and whether it was there already; a process on each named GPU makes
    it.
    """
    # A finished artifact is checked against its source, its parameters and its own bytes there, not redone.
    finished = not options.overwrite and (folder / MANIFEST_NAME).is_file()
    if len(request.devices) > 1 and not finished:
        _quantize_on(request.devices, model, str(recipe), folder, options)
        # What they have made is there now, and is checked as one that is found.
        options = replace(options, overwrite=False)
    artifact = quantize(model, recipe, folder, device=request.device, progress=progress, **values_of(options))
    return artifact, finished


def _quantize_on(
    devices: Sequence[str], model: str, recipe: str, out: Path, options: QuantizeOptions
) -> None:
    """Run `pipeline quantize` in one process per device. A process that fails prints its own error.

    OtherRankFailed is raised with the exit status of a process that fails.
    """
    words = ["quantize", model, "--recipe", recipe, "--out", str(out), *words_of(values_of(options))]
    status = run_on(devices, words, silent=True)
    if status:
        raise OtherRankFailed(f"quantizing on {', '.join(devices)} has failed", status)


def _lay_out(
    result: ReleaseResult, folder: Path, artifact: Artifact, request: ReleaseRequest, progress: bool
) -> None:
    workload = request.workload
    laid_out = lay_out(
        folder,
        ms=workload.ms,
        force=request.engine.layout if folder == result.artifact else None,
        device=request.device or AUTO,
        dtype=request.engine.dtype,
        kv=artifact.kv_cache != UNQUANTIZED,
        contexts=(workload.input_len + workload.output_len,),
        progress=progress,
    )
    _note(result, "layout", not laid_out.measured, laid_out.note)


def _validate(result: ReleaseResult, rival: str | None, request: ReleaseRequest, progress: bool) -> Verdict:
    verdict, why_not = standing_pass(result.artifact, rival, request)
    if verdict is not None:
        _note(result, "validate", True, f"a pass of {verdict.created} stands for these bytes and workload")
        return verdict
    names = {name_of(field) for cls in FOR_VALIDATE for field in options_of(cls)}
    given = {name: value for name, value in request.given.items() if name in names}
    given |= request.placement.for_servers(2 if rival is None else 3).asked_for()
    # Of the recipe's KV format, which the engine's options do not say.
    given |= {"rival": rival, "input_len": request.workload.input_len}
    verdict = validate(result.artifact, progress=progress, **given)
    _note(result, "validate", False, f"{verdict.status} ({why_not})")
    return verdict


def _note(result: ReleaseResult, name: str, skipped: bool, reason: str) -> None:
    """Record a stage, and print it at once, because the next one may take hours."""
    result.stages.append(Stage(name, skipped, reason))
    logger.info(f"{name}: {'done before, skipped; ' if skipped else ''}{reason}")
