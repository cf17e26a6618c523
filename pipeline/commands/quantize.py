"""Quantizing a checkpoint into an artifact folder: shard by shard, in bounded memory, resumable.

This file has the order of the work. `quantization/job.py` decides everything beforehand,
`quantization/write_shards.py` writes; the convention defines the bytes.
"""

import errno
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_files import PARTIAL_SUFFIX
from ...base.errors import UserError
from ...base.log import logger
from ...base.option_fields import from_given, takes
from ...serving_check.engine.options import AUTO
from ..checkpoints.baseline import remember_source
from ..checkpoints.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from ..machine.tested_stack import warn_if_untested
from ..quantization.budget.allocation import Budget
from ..quantization.budget.mixed_recipe import mixed_recipe, require_choice
from ..quantization.calibration.calibration_names import CALIBRATION
from ..quantization.calibration.calibration_result import input_formats
from ..quantization.calibration.calibration_text import read_calibration_text
from ..quantization.calibration.kv_scales import find_kv_scales
from ..quantization.calibration.text_source import budget_source
from ..quantization.estimate import Estimate, estimate
from ..quantization.job import QuantizeJob, prepare, without_left_out
from ..quantization.job_calibration import (
    CalibrationContext,
    calibration_facts,
    calibration_result,
    calibration_sequences,
)
from ..quantization.options import DEFAULT_RECIPE, BudgetOptions, QuantizeOptions
from ..quantization.shards.ranks import Ranks, join_ranks, local_device
from ..quantization.shards.shared_tensors import find_shared_tensors
from ..quantization.shards.tasks import WeightTask
from ..quantization.shards.work_record import (
    WorkRecord,
    clear_folder,
    finished_artifact,
    locked_folder,
    open_record,
    refuse_foreign,
)
from ..quantization.solvers.importance import importance_of
from ..quantization.write_shards import (
    PassResults,
    divide_into_shards,
    output_bytes,
    scale_tensors,
    write_rest,
    write_shards,
)
from ..records.artifact import Artifact
from ..records.recipe import Recipe
from ..records.recipe_file import load_recipe
from ..records.sensitivity_table import SENSITIVITY
from .quantize_manifest import manifest_of, parameters_of, source_of

MAX_SHARD_BYTES = 1 << 30
"""The default size limit of a shard, at which a large model's shards divide evenly among eight processes."""
NOT_COPIED = ("hf_quant_config.json",)
"""Files that describe the source's quantization, which the artifact's own description replaces."""
NO_BUDGET = Budget()
LEFT_OUT_SHOWN = 10
"""How many of the files that are not copied are named on stderr."""


@takes(QuantizeOptions, BudgetOptions)
def quantize(
    model: str | Path,
    recipe: str | Path | Recipe = DEFAULT_RECIPE,
    out: str | Path = "artifact",
    *,
    device: str | torch.device | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
    **options: Any,
) -> Artifact:
    """Quantize `model` (a folder or a Hub id) by `recipe` into the folder `out`.

    If a call is interrupted, the same call continues it; if the job is finished, the call returns at once.
    Under torchrun all processes make the call, and each writes a share of the shards. The bytes written do
    not depend on interruptions, processes or threads. If no text is read, they do not depend on the device
    either.

    options: listed below. A text is read for `method: gptq`, for formats that round inputs or weigh them, and
             for the scales of keys and values. With a budget, layers that a rule of the recipe names keep the
             rule's format
    """
    ranks = join_ranks()
    with ranks.together():
        if ranks.is_first:
            warn_if_untested()
        progress = progress and ranks.is_first
        asked, choice = from_given(QuantizeOptions, options), from_given(BudgetOptions, options)
        budget = Budget(choice.target_bits, choice.max_kl)
        device = local_device(device, ranks)
        checkpoint = ranks.in_turn("source", lambda: open_checkpoint(model, asked.revision))
        chosen = load_recipe(recipe)
        checkpoint = without_left_out(checkpoint, chosen)
        job = prepare(checkpoint, chosen, asked.export, device, asked.calibration)
        if budget == NO_BUDGET:
            _say_unread(job, asked.calibration, progress)
        else:
            require_choice(job)
        travelling = checkpoint.other_files(job.recipe.files)
        copied = {name: path for name, path in travelling.files.items() if name not in NOT_COPIED}
        _say_left_out(travelling.left_out, progress)
        _say_without(checkpoint.left_out, progress)
        _say_fitted(job, progress)
        folder = Path(out).expanduser()
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        _refuse_inside_itself(checkpoint, folder)
        with _writing(folder), locked_folder(folder) if ranks.is_first else nullcontext():
            _prepare_folder(folder, asked.overwrite, copied, ranks)
            source = source_of(checkpoint, copied, ranks, progress)
            told = dict[str, Any]()
            if budget != NO_BUDGET:
                job, told = _with_formats_chosen(job, asked, budget, source, folder, ranks, progress)
            artifact = _quantize_into(folder, job, source, copied, told, max_shard_bytes, ranks, progress)
        artifact.left_out = travelling.left_out
    return artifact


@takes(QuantizeOptions, BudgetOptions)
def preview(
    model: str | Path,
    recipe: str | Path | Recipe = DEFAULT_RECIPE,
    out: str | Path = "artifact",
    *,
    device: str | torch.device | None = None,
    **options: Any,
) -> Estimate:
    """Preview `quantize` with the same arguments: sizes, memory and time. Nothing is written."""
    asked = from_given(QuantizeOptions, options)
    if from_given(BudgetOptions, options) != BudgetOptions():
        raise UserError(
            "--target-bits and --max-kl choose formats by measuring them, which --dry-run does not do; leave "
            "--dry-run out"
        )
    checkpoint = open_checkpoint(model, asked.revision)
    device = None if device == AUTO else device
    chosen = load_recipe(recipe)
    checkpoint = without_left_out(checkpoint, chosen)
    job = prepare(checkpoint, chosen, asked.export, device, asked.calibration)
    _say_unread(job, asked.calibration, progress=True)
    _say_fitted(job, progress=True)
    folder = Path(out).expanduser()
    _refuse_inside_itself(checkpoint, folder)
    return estimate(job, divide_into_shards(job, MAX_SHARD_BYTES), folder)


def bytes_to_write(
    checkpoint: Checkpoint, recipe: Recipe, asked: QuantizeOptions, device: str | None = None
) -> int:
    """Return the bytes of all shards that `quantize` would write. Raise UserError if `quantize` would refuse
    the same arguments.
    """
    checkpoint = without_left_out(checkpoint, recipe)
    job = prepare(checkpoint, recipe, asked.export, device, asked.calibration)
    return sum(output_bytes(checkpoint, task) for task in job.tasks.in_order)


def _prepare_folder(folder: Path, overwrite: bool, copied: Mapping[str, Path], ranks: Ranks) -> None:
    """Raise UserError if the folder holds files that this job may not replace."""

    def prepare_folder() -> None:
        if overwrite and ranks.is_first:
            clear_folder(folder, [*copied, CONFIG_NAME])
        if ranks.is_first:
            refuse_foreign(folder)

    ranks.in_turn("folder", prepare_folder)


def _with_formats_chosen(
    job: QuantizeJob,
    asked: QuantizeOptions,
    budget: Budget,
    source: dict[str, Any],
    folder: Path,
    ranks: Ranks,
    progress: bool,
) -> tuple[QuantizeJob, dict[str, Any]]:
    """Return the job with the formats that suit the budget best, and the manifest's record of the choice."""
    text = job.text or read_calibration_text(job.checkpoint, budget_source(job.recipe, asked.calibration))
    mixed = ranks.in_turn("formats", lambda: mixed_recipe(job, source, budget, text, folder, progress))
    device = job.quantizer.device
    chosen = prepare(job.checkpoint, mixed.recipe, asked.export, device, asked.calibration)
    return chosen, {SENSITIVITY: mixed.table}


def _quantize_into(
    folder: Path,
    job: QuantizeJob,
    source: dict[str, Any],
    copied: Mapping[str, Path],
    told: dict[str, Any],
    max_shard_bytes: int,
    ranks: Ranks,
    progress: bool,
) -> Artifact:
    """Write every file of the artifact, unless it is finished already.

    told: the record of how the formats were chosen
    """
    parameters = parameters_of(job, source, max_shard_bytes)

    def open_work() -> Artifact | WorkRecord:
        finished = finished_artifact(folder, parameters)
        return finished or _opened(folder, parameters, ranks, progress)

    work = ranks.in_turn("record", open_work)
    if isinstance(work, Artifact):
        _notice(f"{folder} is finished already, by the same recipe from the same source", progress)
        return work
    shards, read = _write_all_shards(job, work, max_shard_bytes, ranks, progress)

    def finish() -> Artifact:
        if not ranks.is_first:
            return Artifact.read(folder)
        return _finish(job, work.reload(), shards, copied, parameters, told | read)

    return ranks.in_turn("manifest", finish)


def _opened(folder: Path, parameters: dict[str, Any], ranks: Ranks, progress: bool) -> WorkRecord:
    """Return the job's record; the first process removes unfinished shards from it."""
    record = open_record(folder, parameters)
    if ranks.is_first:
        damaged = record.drop_damaged()
        if damaged:
            _notice(f"made again, since not on disk as recorded: {', '.join(damaged)}", progress)
        for leftover in folder.rglob(f"*{PARTIAL_SUFFIX}"):
            leftover.unlink()
    return record


def _write_all_shards(
    job: QuantizeJob, record: WorkRecord, max_shard_bytes: int, ranks: Ranks, progress: bool
) -> tuple[dict[str, list[WeightTask]], dict[str, Any]]:
    """Compute what needs passes over all weights and over the text, then write the shards.

    Return the shards' tasks, and the manifest's record of the text. The first process reads the text; the
    other processes read the results that the first has kept.
    """
    checkpoint, tasks = job.checkpoint, job.tasks.in_order
    shards = divide_into_shards(job, max_shard_bytes)
    if ranks.is_first:
        _require_room(record, sum(output_bytes(checkpoint, task) for task in tasks))
    shared = find_shared_tensors(checkpoint, shards, job.quantizer, record, ranks, progress)
    context = CalibrationContext(checkpoint, job.quantizer, record.calibration, progress)
    read = ranks.in_turn("text", lambda: calibration_sequences(job.text, job.needs, context))
    sequences = None if read is None else read.sequences
    found = ranks.in_turn(
        "calibration", lambda: calibration_result(sequences, tasks, job.needs, shared, context)
    )
    device = job.quantizer.device
    kv_scales = ranks.in_turn(
        "keys and values",
        lambda: find_kv_scales(checkpoint, job.recipe.kv_cache, sequences, device, record.reload(), progress),
    )
    importance = importance_of(found.squares)
    job = replace(job, quantizer=replace(job.quantizer, importance=importance))
    inputs, scales = input_formats(tasks, found), scale_tensors(job, kv_scales)
    results = PassResults(shared, inputs, found.solved, scales, found.equalized)
    write_shards(job, record, shards, results, ranks, progress)
    if read is None or job.text is None:
        return shards, {}
    return shards, {
        CALIBRATION: {"source": job.text.name, **read.facts, **calibration_facts(found, job.needs)}
    }


def _require_room(record: WorkRecord, size: int) -> None:
    """Raises OSError, as a full disk does, if there is no room for the missing shards."""
    size -= sum(path.stat().st_size for path in record.folder.glob("*.safetensors"))
    free = shutil.disk_usage(record.folder).free
    if size > free:
        said = f"{size / 1e6:,.0f} MB are still to be written, {free / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, said)


def _finish(
    job: QuantizeJob,
    record: WorkRecord,
    shards: Mapping[str, list[WeightTask]],
    copied: Mapping[str, Path],
    parameters: dict[str, Any],
    told: dict[str, Any],
) -> Artifact:
    """Write all files except the shards, the manifest last, and return it."""
    write_rest(job, record, shards, copied)
    sidecars = job.convention.sidecars(job.quantization_config)
    written = {*shards, *copied, *sidecars, CONFIG_NAME, INDEX_NAME}
    artifact = manifest_of(job, record, parameters, written, told)
    remember_source(record.folder, job.checkpoint)
    artifact.write(record.folder)
    record.remove()
    return artifact


def _refuse_inside_itself(checkpoint: Checkpoint, folder: Path) -> None:
    if folder.resolve() == checkpoint.folder.resolve():
        raise UserError(f"{folder} is the checkpoint itself; give another folder with --out")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a message that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"no room to write in {folder} ({reason}); make room and run the same command again: "
                "finished shards are kept"
            ) from error
        raise UserError(
            f"cannot write in {folder} ({reason}); give a folder that can be written with --out"
        ) from error


def _say_left_out(left_out: Mapping[str, str], progress: bool) -> None:
    for name, reason in list(left_out.items())[:LEFT_OUT_SHOWN]:
        _notice(f"left out {name}: {reason}", progress)
    if len(left_out) > LEFT_OUT_SHOWN:
        _notice(f"left out {len(left_out) - LEFT_OUT_SHOWN} more files; --json lists them", progress)


def _say_without(tensors: Sequence[str], progress: bool) -> None:
    if tensors:
        shown = ", ".join(tensors[:LEFT_OUT_SHOWN])
        more = f" and {len(tensors) - LEFT_OUT_SHOWN} more" if len(tensors) > LEFT_OUT_SHOWN else ""
        _notice(f"left out by the recipe: {shown}{more}", progress)


def _say_fitted(job: QuantizeJob, progress: bool) -> None:
    if job.tasks.fitted:
        _notice(f"not every layer can be {job.recipe.spec.label}: {job.tasks.fitted}", progress)


def _say_unread(job: QuantizeJob, calibration: str | None, progress: bool) -> None:
    """Warn if the given text is not read. An unread text is no error, since a release passes its text to its
    rival's recipe too."""
    if calibration is not None and job.text is None:
        name = job.recipe.name
        _notice(
            f"--calibration {calibration} is not read: the recipe {name!r} has nothing to calibrate", progress
        )


def _notice(text: str, progress: bool) -> None:
    if progress:
        logger.info(text)
