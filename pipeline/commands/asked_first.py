"""Checks of a release's source, before anything is quantized, for problems that a later stage would refuse.

The checks cover room on disks and in memory, checkpoints and texts that cannot be read, and a card that the
Hub would refuse. `release_request.py` checks the options by themselves; `push.py` checks whether a target can
be written.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ...base.errors import UserError
from ...base.log import logger
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.vllm import VLLM
from ...serving_check.engine.options import EngineOptions
from ..checkpoints.base_metadata import read_base_metadata
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.all_conventions import EXPORTS
from ..conventions.convention import StackingConvention
from ..model_loader.contradictions import refuse_contradictions
from ..publishing.card_metadata import licence_of, preliminary_card
from ..quantization.job import chosen_export, without_left_out
from ..quantization.shards.tasks import make_tasks
from ..records.engine_commands import VLLM_FAILS
from ..records.recipe import Recipe
from ..records.recipe_file import is_recipe, load_recipe
from ..validation.given_text import read_given
from ..validation.gpu_memory import GIB, Side, own_pool_bytes, plan_memory, served_bytes
from ..validation.held_out import window_for
from ..validation.rival import rival_folder
from ..validation.run import require_context
from ..validation.servers import placed, sides_of, sized_options
from ..validation.task_scores import require_lm_eval, task_context
from .push import check_card, target_folder
from .quantize import bytes_to_write
from .release_request import ReleaseRequest


@dataclass(frozen=True)
class PlannedFiles:
    """The bytes still to be written, by folder."""

    quantized: Mapping[Path, int]
    """The bytes of the artifact, and of a rival that a recipe makes."""
    published: Mapping[Path, int]
    """The bytes of the copy in a target folder."""


def planned_files(
    source: Checkpoint,
    recipe: Recipe,
    request: ReleaseRequest,
    folder: Path,
    to: str,
    written: int | None = None,
) -> PlannedFiles:
    """Return the bytes of files that are not there yet. Raise UserError if a recipe, the rival's too, cannot
    quantize `source`.

    written: the artifact's bytes, if they are known
    """
    if written is None:
        written = bytes_to_write(source, recipe, request.making, request.device)
    quantized = {folder: max(0, written - _present(folder))}
    rival = request.validation.rival or recipe.rival
    if rival is not None and is_recipe(rival):
        # Its own recipe says which convention can store it.
        making = replace(request.making, export=None)
        place = rival_folder(folder.parent, source.source, rival)
        size = bytes_to_write(source, load_recipe(rival), making, request.device)
        quantized[place] = max(0, size - _present(place))
    directory = target_folder(to)
    return PlannedFiles(quantized, {} if directory is None else {directory: written})


def _present(folder: Path) -> int:
    """Return the bytes of the shards that an interrupted run has left."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse_later(source: Checkpoint, request: ReleaseRequest, planned: PlannedFiles) -> None:
    """Raise UserError if a later stage of this release of `source` cannot succeed on this machine."""
    refuse_full_disks(planned)
    refuse_contradictions(source)
    validation, workload = request.validation, request.workload
    baseline, rival = validation.baseline, validation.rival
    sides = [source if baseline is None else open_checkpoint(baseline, validation.baseline_revision)]
    if rival is not None and not is_recipe(rival):
        sides.append(open_checkpoint(rival, validation.rival_revision))
    for side in (source, *sides):
        require_context(side, workload)
    if validation.text is not None:
        window = window_for(source, sides[0], request.kv_cache, validation.quality_tokens)
        how = validation.quality_tokens, window, workload.input_len
        read_given(validation.text, source, sides[0], *how)
    _refuse_small_memory(sides[0], request, sum(planned.quantized.values()))


def refuse_unread(source: Checkpoint, recipe: Recipe, request: ReleaseRequest) -> list[str]:
    """Raise UserError if vLLM would have to serve experts that it does not load. Returns notes if the release
    is not served by vLLM.
    """
    reason = VLLM_FAILS.get(source.model_type)
    if reason is None or not _stores_single_experts(source, recipe, request.making.export):
        return []
    if request.validation.engine == VLLM.name:
        raise UserError(
            f"--engine {VLLM.name}: vLLM cannot load what this recipe makes of {source.public_name}: "
            f"{reason}; leave --engine out, take the recipe mxfp4-experts, or add "
            "`ignore: ['*.experts.*']` to this one"
        )
    return [f"vLLM will not load the release: {reason}"]


def _stores_single_experts(source: Checkpoint, recipe: Recipe, export: str | None) -> bool:
    """Say whether the release has quantized experts, each in tensors of its own."""
    checkpoint = without_left_out(source, recipe)
    tasks = make_tasks(checkpoint, recipe)
    if isinstance(EXPORTS[chosen_export(checkpoint, recipe, tasks, export)], StackingConvention):
        return False
    linears = (task.linear for task in tasks.in_order if task.is_quantized)
    return any(linear is not None and linear.is_expert for linear in linears)


def lacking_tools(request: ReleaseRequest) -> list[str]:
    """Return packages or engines that the validation needs and this machine lacks: a dry run notes them, any
    other run refuses them.
    """
    validation = request.validation
    lacking = []
    for name in dict.fromkeys((validation.engine, validation.engine_of_baseline)):
        found = engine_named(name).availability() if engine_named(name).starts else None
        if found is not None and not found.available:
            lacking.append(
                f"--engine {name}: {found.detail}" + (f"; {found.install}" if found.install else "")
            )
    if validation.tasks is not None:
        try:
            require_lm_eval()
        except UserError as error:
            lacking.append(error.message)
    return lacking


def refuse_card(source: Checkpoint, recipe: Recipe, to: str) -> list[str]:
    """Raise UserError if the Hub would refuse the fields that the card copies from the base's card. Returns
    notes.
    """
    metadata = read_base_metadata(source.folder)
    files = source.other_files(recipe.files).files
    if target_folder(to) is None:
        check_card(to, preliminary_card(source.public_name, source.revision, metadata, list(files)))
    if licence_of(metadata) is None:
        return [f"the card of {source.public_name} names no licence, so the release's will name none"]
    return []


def refuse_full_disks(planned: PlannedFiles) -> None:
    """Raise UserError if a disk has no room for everything that has to be written to it."""
    wanted: dict[int, dict[Path, int]] = defaultdict(dict)
    for folder, size in (*planned.quantized.items(), *planned.published.items()):
        wanted[os.stat(_there(folder)).st_dev][folder] = size
    for folders in wanted.values():
        needed, free = sum(folders.values()), shutil.disk_usage(_there(next(iter(folders)))).free
        if needed > free:
            listed = ", ".join(f"{size / 1e6:,.0f} MB into {folder}" for folder, size in folders.items())
            raise UserError(
                f"no room: {listed}, and the disk has {free / 1e6:,.0f} MB free; make room, or name folders "
                "on another disk with --work and --to"
            )


def _there(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())


def _refuse_small_memory(baseline: Checkpoint, request: ReleaseRequest, quantized: int) -> None:
    """Raise UserError if the servers' weights alone exceed the free memory.

    On a GPU servers may take turns, so the error is raised on a GPU only if the baseline's server alone does
    not fit.
    """
    validation, workload = request.validation, request.workload
    engine = validation.engine_of_baseline
    if not engine_named(engine).starts:
        return
    longest_task = 0 if validation.tasks is None else task_context(baseline)
    options = sized_options(request.given, workload, longest_task, baseline.context)
    options = replace(options, device=placed(options.device, request.placement))
    if options.device != "cpu":
        wanted = [("baseline", engine, baseline, options)]
        plan_memory(sides_of(wanted, request.placement), request.placement)
        return
    weights, free = served_bytes(baseline) + quantized, psutil.virtual_memory().available
    if weights > free:
        raise UserError(
            f"no room: the servers hold at least {weights / GIB:.1f} GiB of weights at the same time, and "
            f"{free / GIB:.1f} GiB of memory are free; end other programs, or use another machine"
        )
    pool = _pool_bytes(baseline, engine, options)
    if weights + pool > free:
        raise UserError(
            f"no room: beside {weights / GIB:.1f} GiB of weights a server keeps {pool / GIB:.1f} GiB of "
            f"keys, values and states for {options.max_num_seqs} requests, and {free / GIB:.1f} GiB of "
            "memory are free; use a smaller --m or --input-len, end other programs, or use another machine"
        )


def _pool_bytes(baseline: Checkpoint, engine: str, options: EngineOptions) -> int:
    """Return the bytes of the pool of the baseline's server on a CPU; 0 if that is not known."""
    if not engine_named(engine).packs_with_layouts:
        return 0
    try:
        return own_pool_bytes(Side("baseline", engine, baseline, options))
    except Exception as error:
        # What cannot be run on the meta device may run on another: the server will say.
        logger.debug(f"the pool of {baseline.source} is not known beforehand: {error}")
        return 0
