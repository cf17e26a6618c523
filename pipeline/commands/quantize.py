"""Quantizing a checkpoint into an artifact folder: shard by shard, in bounded memory, resumable.

The order of the work is here. What is decided beforehand is `quantization/job.py`, what is written
`quantization/write_shards.py`; the bytes are the convention's.
"""

import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_files import PARTIAL_SUFFIX
from ...base.errors import UserError
from ...base.installed import NOT_INSTALLED, installed_version
from ...base.log import logger
from ...layouts.formats.weight_format import spec_to_json
from ..checkpoints.base_metadata import read_base_metadata
from ..checkpoints.baseline import remember_source, weights_digest
from ..checkpoints.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from ..machine.tested_stack import warn_if_untested
from ..quantization.budget.allocation import PLAIN_BITS, Budget
from ..quantization.budget.mixed_recipe import mixed_recipe, require_choice
from ..quantization.calibration.calibration_names import CALIBRATION
from ..quantization.calibration.calibration_result import input_formats
from ..quantization.calibration.calibration_text import read_calibration_text
from ..quantization.calibration.kv_scales import find_kv_scales
from ..quantization.calibration.text_source import budget_source
from ..quantization.estimate import Estimate, estimate
from ..quantization.job import QuantizeJob, prepare
from ..quantization.job_calibration import (
    CalibrationContext,
    calibration_facts,
    calibration_result,
    calibration_sequences,
)
from ..quantization.shards.progress import byte_bar
from ..quantization.shards.ranks import Ranks, join_ranks, local_device
from ..quantization.shards.shared_tensors import find_shared_tensors
from ..quantization.shards.tasks import WeightTask
from ..quantization.shards.work_record import (
    WorkRecord,
    clear_folder,
    finished_artifact,
    locked_folder,
    open_record,
    parameters_digest,
    refuse_foreign,
)
from ..quantization.solvers.importance import importance_of
from ..quantization.write_shards import (
    PassResults,
    divide_into_shards,
    rounded,
    scale_tensors,
    write_rest,
    write_shards,
)
from ..records.artifact import SCALED_BY, Artifact, FileRecord, record_files
from ..records.engine_commands import kv_cache_commands
from ..records.file_digests import sha256_of_each
from ..records.recipe import Recipe
from ..records.recipe_file import load_recipe
from ..records.sensitivity_table import SENSITIVITY, plain_weights

MAX_SHARD_BYTES = 1 << 30
"""So small that the shards of a large model divide evenly among eight processes."""
NOT_COPIED = ("hf_quant_config.json",)
"""Files about a quantization of the source, which the artifact's own replaces."""
VERSIONED_PACKAGES = ("scalegate", "torch", "transformers", "torchao")
MODULE_FIGURES = ("shape", "format", "relative_error", SCALED_BY, "output_error")
"""What the manifest says of each quantized module."""
NO_BUDGET = Budget()
LEFT_OUT_SHOWN = 10
"""Files beside the source's weights that are named one by one on stderr."""


def quantize(
    model: str | Path,
    recipe: str | Path | Recipe = "int4-hqq",
    out: str | Path = "artifact",
    *,
    revision: str | None = None,
    export: str | None = None,
    device: str | torch.device | None = None,
    calibration: str | Path | None = None,
    target_bits: float | None = None,
    max_kl: float | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> Artifact:
    """Quantize `model` (a folder or a Hub id) by `recipe` into the folder `out`.

    An interrupted call is taken up where it stopped by the same call again; a finished one returns at once.
    Under torchrun all processes make the call, and each writes a share of the shards. The bytes written do
    not depend on interruptions, processes or threads, nor, where no text is read, on the device.

    export:      a convention; left out, compressed-tensors, or our own for formats that no other one stores
    calibration: plain text, or .jsonl with one `{"text": ...}` a line; `hub:OWNER/NAME`; or `self`, for what
                 the model itself writes, in the place of the recipe's; for `method: gptq`, for formats that
                 round inputs or heed how much each matters, and for the scales of keys and values
    target_bits: INT4 layers get the group sizes, or INT8, or stay plain, as buys most at so many bits a
                 weight; those that a rule of the recipe names keep what it says
    max_kl:      the same, at the fewest bits that keep the divergence, in nats, to this
    """
    ranks = join_ranks()
    with ranks.together():
        if ranks.is_first:
            warn_if_untested()
        progress = progress and ranks.is_first
        device = local_device(device, ranks)
        checkpoint = ranks.in_turn("source", lambda: open_checkpoint(model, revision))
        text = None if calibration is None else str(calibration)
        folder = Path(out).expanduser()
        budget, told = Budget(target_bits, max_kl), dict[str, Any]()
        job = prepare(checkpoint, load_recipe(recipe), export, device, text)
        if target_bits is None and max_kl is None:
            _say_unread(job, text, progress)
        else:
            require_choice(job)
        travelling = checkpoint.other_files(job.recipe.files)
        copied = {name: path for name, path in travelling.files.items() if name not in NOT_COPIED}
        _say_left_out(travelling.left_out, progress)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        _refuse_inside_itself(checkpoint, folder)
        with _writing(folder), locked_folder(folder) if ranks.is_first else nullcontext():

            def check_folder() -> None:
                if overwrite and ranks.is_first:
                    clear_folder(folder, [*copied, CONFIG_NAME])
                if ranks.is_first:
                    refuse_foreign(folder)

            ranks.in_turn("folder", check_folder)
            source = _source(checkpoint, copied, ranks, progress)
            if budget != NO_BUDGET:
                asked = job
                read_on = job.text or read_calibration_text(checkpoint, budget_source(job.recipe, text))
                mixed = ranks.in_turn(
                    "formats", lambda: mixed_recipe(asked, source, budget, read_on, folder, progress)
                )
                job = prepare(checkpoint, mixed.recipe, export, device, text)
                told = {SENSITIVITY: mixed.table}
            parameters = _parameters(job, source, max_shard_bytes)

            def open_work() -> Artifact | WorkRecord:
                finished = finished_artifact(folder, parameters)
                return finished or _opened(folder, parameters, ranks, progress)

            work = ranks.in_turn("record", open_work)
            if isinstance(work, Artifact):
                _notice(f"{folder} is finished already, by the same recipe from the same source", progress)
                artifact = work
            else:
                shards, read = _write_all_shards(job, work, max_shard_bytes, ranks, progress)

                def finish() -> Artifact:
                    if ranks.is_first:
                        _finish(job, work.reload(), shards, copied, parameters, told | read)
                    return Artifact.read(folder)

                artifact = ranks.in_turn("manifest", finish)
        artifact.left_out = travelling.left_out
    return artifact


def preview(
    model: str | Path,
    recipe: str | Path | Recipe = "int4-hqq",
    out: str | Path = "artifact",
    *,
    revision: str | None = None,
    export: str | None = None,
    device: str | torch.device | None = None,
    calibration: str | Path | None = None,
) -> Estimate:
    """What `quantize` would do with the same arguments: sizes, memory and time. Nothing is written."""
    checkpoint = open_checkpoint(model, revision)
    text = None if calibration is None else str(calibration)
    device = None if device == "auto" else device
    job = prepare(checkpoint, load_recipe(recipe), export, device, text)
    _say_unread(job, text, progress=True)
    folder = Path(out).expanduser()
    _refuse_inside_itself(checkpoint, folder)
    return estimate(job, divide_into_shards(checkpoint, job.tasks.in_order, MAX_SHARD_BYTES), folder)


def _opened(folder: Path, parameters: dict[str, Any], ranks: Ranks, progress: bool) -> WorkRecord:
    """The job's record; the first process leaves in it only what is whole."""
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
    """Make the passes over all weights and over the text, then write the shards.

    Returns the shards' tasks, and what the manifest says of the text. The first process reads the text; the
    others read the results that it has kept.
    """
    checkpoint, tasks = job.checkpoint, job.tasks.in_order
    shards = divide_into_shards(checkpoint, tasks, max_shard_bytes)
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


def _finish(
    job: QuantizeJob,
    record: WorkRecord,
    shards: Mapping[str, list[WeightTask]],
    copied: Mapping[str, Path],
    parameters: dict[str, Any],
    told: dict[str, Any],
) -> None:
    """All but the shards, the manifest last."""
    write_rest(job, record, shards, copied)
    sidecars = job.convention.sidecars(job.quantization_config)
    written = {*shards, *copied, *sidecars, CONFIG_NAME, INDEX_NAME}
    artifact = _artifact(job, record, parameters, written, told)
    remember_source(record.folder, job.checkpoint)
    artifact.write(record.folder)
    record.remove()


def _source(
    checkpoint: Checkpoint, copied: Mapping[str, Path], ranks: Ranks, progress: bool
) -> dict[str, Any]:
    """What identifies the checkpoint's bytes: the Hub's commit, or the digests of its files."""
    source: dict[str, Any] = {"name": checkpoint.public_name, "revision": checkpoint.revision}
    if checkpoint.revision is not None:
        return source
    paths = [checkpoint.folder / CONFIG_NAME, *checkpoint.shards, *copied.values()]
    sizes = {path: path.stat().st_size for path in paths}
    with byte_bar(sum(sizes.values()), "checking the source", ranks, progress) as read:
        mine = {}
        dealt = ranks.deal("checking the source", paths, sizes.__getitem__)
        for path, digest in sha256_of_each(dealt):
            mine[path.relative_to(checkpoint.folder).as_posix()] = digest
            read(sizes[path])
    digests: dict[str, str] = {}
    for theirs in ranks.gather("source digests", mine):
        digests |= theirs
    names = {path.relative_to(checkpoint.folder).as_posix(): size for path, size in sizes.items()}
    return source | {"files": {name: {"size": names[name], "sha256": digests[name]} for name in names}}


def _parameters(job: QuantizeJob, source: dict[str, Any], max_shard_bytes: int) -> dict[str, Any]:
    """Everything that decides the artifact's bytes."""
    return {
        "source": source,
        "recipe": job.recipe.to_json(),
        "export": job.export,
        "shard size": max_shard_bytes,
        "versions": {name: installed_version(name) or NOT_INSTALLED for name in VERSIONED_PACKAGES},
        **({"calibration text": job.text.parameters} if job.text else {}),
    }


def _artifact(
    job: QuantizeJob,
    record: WorkRecord,
    parameters: dict[str, Any],
    written: set[str],
    told: dict[str, Any],
) -> Artifact:
    """The manifest; told: what its formats were chosen by and which text was read, where there was that."""
    checkpoint, recipe = job.checkpoint, job.recipe
    shards = {name: shard.file for name, shard in record.shards.items()}
    measured = {module: value for shard in record.shards.values() for module, value in shard.modules.items()}
    specs, shapes = job.tasks.specs, job.tasks.shapes
    measured = {module: measured[module] for module in specs}
    elements = {module: n * k for module, (n, k) in shapes.items()}
    bits = sum(
        elements[module] * job.convention.bits_per_weight(spec, *shapes[module])
        for module, spec in specs.items()
    )
    # What a budget has kept plain is of what it counted.
    plain = plain_weights(told)
    weights, bits = sum(elements.values()) + plain, bits + PLAIN_BITS * plain
    norm = sum(value["squared_norm"] for value in measured.values())
    error = sum(value["squared_error"] for value in measured.values())
    quantization = {
        "formats": [
            {"label": spec.label, "modules": count, "spec": spec_to_json(spec)}
            for spec, count in Counter(specs.values()).most_common()
        ],
        "export": job.export,
        "bits_per_weight": round(bits / weights, 4) if weights else 0.0,
        "relative_error": rounded((error / norm) ** 0.5) if norm else 0.0,
        "modules": {
            module: {key: value[key] for key in MODULE_FIGURES if key in value}
            for module, value in measured.items()
        },
        **told,
        "kept": job.tasks.kept,
        "untied_lm_head": job.tasks.untied,
        "source": parameters["source"],
        "parameters_sha256": parameters_digest(parameters),
    }
    return Artifact(
        source=checkpoint.public_name,
        source_revision=checkpoint.revision,
        recipe=recipe.to_json(),
        versions=parameters["versions"],
        files={name: one for name, one in record_files(record.folder, shards).items() if name in written},
        quantization=quantization,
        base_metadata=read_base_metadata(checkpoint.folder),
        source_sha256=weights_digest(checkpoint, _source_records(parameters)),
        kv_cache=recipe.kv_cache,
        kv_cache_engines=kv_cache_commands(recipe.kv_cache),
    )


def _source_records(parameters: dict[str, Any]) -> dict[str, FileRecord]:
    """The files of a source folder, hashed when the job began; none of a Hub id's."""
    files = parameters["source"].get("files", {})
    return {name: FileRecord(**record) for name, record in files.items()}


def _refuse_inside_itself(checkpoint: Checkpoint, folder: Path) -> None:
    if folder.resolve() == checkpoint.folder.resolve():
        raise UserError(f"{folder} is the checkpoint itself; give another folder with --out")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what a full or read-only disk says into a message that says what to do."""
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


def _say_unread(job: QuantizeJob, calibration: str | None, progress: bool) -> None:
    """Not refused: a release gives its text to its rival's recipe too."""
    if calibration is not None and job.text is None:
        name = job.recipe.name
        _notice(
            f"--calibration {calibration} is not read: the recipe {name!r} has nothing to calibrate", progress
        )


def _notice(text: str, progress: bool) -> None:
    if progress:
        logger.info(text)
