"""Preview of a release: what it makes, measures and publishes, and about how long it takes (`release
--dry-run`).

The preview refuses everything that `release` refuses before it quantizes. Nothing is written or sent, and no
server is started.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...base.errors import UserError
from ...base.option_fields import takes
from ...serving_check.engine.options import AUTO, SIZED
from ...serving_check.gate.record import parse_verdict
from ...serving_check.statistics.decide import LOOKS
from ..checkpoints.checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..machine.device import resolve_device, resolve_dtype
from ..publishing.bundle import CARD_NAME
from ..publishing.hub.failures import HubNotAskedError
from ..quantization.estimate import Estimate
from ..records.artifact import MANIFEST_NAME, REPORT_FOLDER, VERDICT_NAME
from ..records.recipe import Recipe
from ..records.recipe_file import load_recipe
from ..report.names import REPORT_NAMES
from ..validation.gpu_memory import served_bytes
from ..validation.time_estimate import least_serving_seconds
from .asked_first import lacking_tools, planned_files, refuse_card, refuse_later, refuse_unread
from .push import check_target
from .quantize import preview
from .release import artifact_folder
from .release_request import (
    DEFAULT_WORK,
    GROUPS,
    ReleaseRequest,
    read_request,
    refuse_exploratory,
    refuse_unserved_source,
)


@dataclass(frozen=True)
class ServingEstimate:
    """The basis of the verdict: workload, text and bounds. `memory` is in bytes."""

    ms: tuple[int, ...]
    drawn_ms: int
    """How many further Ms are drawn between the given ones."""
    input_len: int
    output_len: int
    engine: str
    baseline: str
    rival: str | None
    floor: float
    quality_tokens: int
    tasks: str | None
    requests: int
    """The least number of requests to each server."""
    seconds: float
    """Seconds of the linear layers alone if each M is decided as early as possible."""
    most_seconds: float
    """The same if each M takes all of its blocks."""
    last_seconds: float | None
    """Seconds that the last verdict on this artifact took; None if there is none."""
    memory: int
    """Bytes of the weights in all servers together."""


@dataclass(frozen=True)
class ReleasePreview:
    artifact: str
    done_before: bool
    """Whether there is a finished artifact, which would be checked and not made again."""
    quantize: Estimate
    validate: ServingEstimate
    target: str
    files: tuple[str, ...]
    """The files that would be published, besides the weights' shards."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@takes(*GROUPS, sized=SIZED)
def preview_release(
    model: str | Path, recipe: str | Path, to: str, *, work: str | Path = DEFAULT_WORK, **options: Any
) -> ReleasePreview:
    """Preview `release` with the same arguments. Raise UserError if `release` would refuse the arguments."""
    model, chosen = str(model), load_recipe(recipe)
    request = read_request(options, chosen)
    publication = request.publication
    folder = artifact_folder(work, model, chosen)
    refuse_exploratory(chosen, request)
    notes = []
    try:
        check_target(folder, to, publication.private, publication.create_pr, publication.to_revision)
    except HubNotAskedError as reason:
        notes.append(f"what {to} holds was not looked at: {reason.message}")
    source = open_checkpoint(model, request.making.revision)
    refuse_unserved_source(source, request)
    quantized = preview(
        model,
        chosen,
        folder,
        revision=request.making.revision,
        export=request.making.export,
        device=request.device,
        calibration=request.making.calibration,
    )
    finished = not request.making.overwrite and (folder / MANIFEST_NAME).is_file()
    if not finished:
        notes += refuse_unread(source, chosen, request)
        notes += lacking_tools(request)
        try:
            notes += refuse_card(source, chosen, to)
        except HubNotAskedError as reason:
            notes.append(f"the Hub was not asked whether it takes the card: {reason.message}")
        planned = planned_files(source, chosen, request, folder, to, quantized.bytes_written)
        refuse_later(source, request, planned)
    travelling = source.other_files(chosen.files).files
    report = [f"{REPORT_FOLDER}/{name}" for name in REPORT_NAMES]
    return ReleasePreview(
        artifact=str(folder),
        done_before=finished,
        quantize=quantized,
        validate=_serving_estimate(source, chosen, request, folder if finished else None, quantized),
        target=to,
        files=tuple(sorted([CONFIG_NAME, *travelling, *report, VERDICT_NAME, CARD_NAME, MANIFEST_NAME])),
        notes=tuple(notes),
    )


def _serving_estimate(
    source: Checkpoint, recipe: Recipe, request: ReleaseRequest, finished: Path | None, quantized: Estimate
) -> ServingEstimate:
    """Return the estimate for the serving check. finished: the artifact's folder, if the artifact is
    finished
    """
    validation, workload = request.validation, request.workload
    numbers = sum(math.prod(info.shape) for info in source.tensors.values())
    rival = validation.rival or recipe.rival or None
    sides = 2 if rival is None else 3
    device = torch.device(resolve_device(request.device or AUTO))
    dtype = resolve_dtype(request.engine.dtype) or default_dtype(source)
    seconds = least_serving_seconds(numbers, workload, sides, device, dtype)
    return ServingEstimate(
        ms=workload.ms,
        drawn_ms=len(workload.ms_between),
        input_len=workload.input_len,
        output_len=workload.output_len,
        engine=validation.engine,
        baseline=validation.baseline or source.source,
        rival=rival,
        floor=request.bounds(recipe.to_json()).throughput_floor,
        quality_tokens=validation.quality_tokens,
        tasks=validation.tasks,
        requests=sum(workload.ms) * workload.waves * LOOKS[0],
        seconds=seconds,
        most_seconds=seconds * max(1.0, workload.max_blocks / LOOKS[0]),
        last_seconds=None if finished is None else _last_seconds(finished),
        memory=served_bytes(source) + (sides - 1) * quantized.bytes_written,
    )


def _last_seconds(folder: Path) -> float | None:
    """Return the seconds that the last verdict took; None if there is no verdict, or it cannot be read."""
    if not (folder / VERDICT_NAME).is_file():
        return None
    try:
        return parse_verdict(folder / VERDICT_NAME).duration_seconds
    except UserError:
        return None
