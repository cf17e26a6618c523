"""Writes an artifact's shards one task after another, and the files beside them."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from ...base.atomic_files import atomic_path, write_json
from ...base.errors import UserError
from ...base.log import logger
from ...base.untrusted_names import parent_leads_out
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.weight_format import spec_to_json
from ...layouts.kv.format import KVScales
from ..checkpoints.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint
from ..checkpoints.quantization_section import MLX_SECTION, OLD_SECTION, SECTION
from ..checkpoints.safetensors_file import hold_the_same, read_header
from ..conventions.convention import ExportConvention, StackingConvention, kv_scale_names
from ..model_loader.prediction_heads import without_heads
from ..model_loader.skeleton import model_config
from ..records.artifact import SCALED_BY, FileRecord
from ..records.file_digests import sha256_of
from .calibration.calibration_result import WeightReader
from .job import QuantizeJob
from .shards.progress import byte_bar
from .shards.ranks import Ranks
from .shards.shard_writer import ShardWriter, header_room
from .shards.shared_tensors import Shared
from .shards.tasks import WeightTask, source_bytes, tasks_by_tensor
from .shards.weight_tensors import read_bias, read_kept, read_linear, refuse_non_finite
from .shards.work_record import FinishedShard, WorkRecord
from .solvers.equalization import EqualizedNorm

TENSORS_OF_A_LINEAR = ("packed", "scale", "zero_point", "shape")
ERROR_DIGITS = 6
SHARD_NAME = "model{suffix}.safetensors"


@dataclass(frozen=True)
class PassResults:
    """The results of the passes over all weights and over the text, before the first shard is written; by
    module."""

    shared: Shared
    inputs: Mapping[str, InputFormat]
    solved: Mapping[str, WeightReader]
    kv_scales: Mapping[str, Tensor]
    """The scales of keys and values, by the tensor's name in the checkpoint, not by module."""
    equalized: Mapping[str, EqualizedNorm]
    """The norms that have absorbed scales, by the norm's tensor."""

    def norm_of(self, module: str) -> str | None:
        """Return the norm that has absorbed the scales of the module's columns."""
        return next((name for name, norm in self.equalized.items() if module in norm.modules), None)


def divide_into_shards(job: QuantizeJob, max_shard_bytes: int) -> dict[str, list[WeightTask]]:
    """Divide the tasks, in order, among files of at most `max_shard_bytes`; a larger task gets its own file.

    If a convention stacks experts, all tasks of a tensor are in one file.
    """
    tasks = job.tasks.in_order
    parts = tasks_by_tensor(tasks) if _stacks(job) else [[task] for task in tasks]
    split = split_state_dict_into_shards_factory(
        {str(index): part for index, part in enumerate(parts)},
        get_storage_size=lambda part: sum(output_bytes(job.checkpoint, task) for task in part),
        filename_pattern=SHARD_NAME,
        max_shard_size=max_shard_bytes,
    )
    return {
        file: [task for index in own for task in parts[int(index)]]
        for file, own in split.filename_to_tensors.items()
    }


def _stacks(job: QuantizeJob) -> bool:
    return isinstance(job.convention, StackingConvention)


def output_bytes(checkpoint: Checkpoint, task: WeightTask) -> int:
    """Return the bytes that a task writes into its shard."""
    info = checkpoint.tensors[task.tensor]
    if task.bias is not None:
        return source_bytes(checkpoint, task)
    if task.linear is None:
        return info.nbytes * (2 if info.dtype.itemsize == 1 else 1)
    return task.spec.nbytes(task.linear.n, task.linear.k)


def scale_tensors(job: QuantizeJob, scales: Mapping[str, KVScales]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for attention, pair in scales.items():
        key, value = kv_scale_names(job.convention, attention)
        tensors |= {key: pair.key, value: pair.value}
    return tensors


def write_shards(
    job: QuantizeJob,
    record: WorkRecord,
    shards: Mapping[str, list[WeightTask]],
    results: PassResults,
    ranks: Ranks,
    progress: bool,
) -> None:
    """Write this process's share of the unfinished shards, and wait for the other processes."""

    def cost(name: str) -> int:
        return sum(source_bytes(job.checkpoint, task) for task in shards[name])

    done = sum(cost(name) for name in shards if name in record.shards)
    with byte_bar(sum(map(cost, shards)), "quantizing", ranks, progress, done) as read:
        for name in ranks.deal("quantizing", list(shards), cost):
            if name in record.shards:
                continue
            modules: dict[str, dict[str, Any]] = {}
            path = record.folder / name
            last = results.kv_scales if name == list(shards)[-1] else {}
            room = header_room([*_names_with_room(shards[name]), *last], job.file_metadata)
            with atomic_path(path) as partial:
                with ShardWriter(partial, room, job.file_metadata) as writer:
                    for tasks in tasks_by_tensor(shards[name]):
                        is_stacked = _stacks(job) and tasks[0].is_quantized
                        taken = _Experts() if is_stacked else writer
                        for task in tasks:
                            modules |= _carry_out(job, task, results, taken)
                            read(source_bytes(job.checkpoint, task))
                        if isinstance(taken, _Experts):
                            taken.write(job.convention, writer)
                    for tensor, scale in last.items():
                        writer.add(tensor, scale)
                # Before the shard has its name: one that has it is never made again, wherever a kill strikes.
                file = FileRecord(partial.stat().st_size, sha256_of(partial))
                record.finish(name, FinishedShard(file, modules))
            logger.debug(f"{path}: {len(modules)} quantized modules, {file.size:,} bytes")


def _names_with_room(tasks: list[WeightTask]) -> Iterator[str]:
    """Yield placeholder names: at least as many as the tensors that the given tasks write, and at least as
    long as their names.
    """
    for task in tasks:
        if task.linear is None:
            yield task.written_name
        else:
            for tensor in TENSORS_OF_A_LINEAR:
                yield f"{task.linear.module}._weight_{tensor}_and_more"


class Taking(Protocol):
    """What a task's tensors are given to: a shard's writer, or a collection that is written later."""

    def add(self, name: str, tensor: Tensor) -> None: ...

    def add_chunks(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Iterable[Tensor]
    ) -> None: ...


class _Experts:
    """The tensors of all experts of one tensor of the source, until they are written together."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor

    def add_chunks(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Iterable[Tensor]
    ) -> None:
        raise TypeError(f"{name} is of no expert")

    def write(self, convention: ExportConvention, writer: ShardWriter) -> None:
        if not isinstance(convention, StackingConvention):
            raise TypeError(f"{convention.name} stores experts one by one")
        for name, tensor in convention.stacked(self.tensors).items():
            writer.add(name, tensor)


def _carry_out(
    job: QuantizeJob, task: WeightTask, results: PassResults, writer: Taking
) -> dict[str, dict[str, Any]]:
    """Write one task's tensors. Return the measurements of a quantized module, by the module's name."""
    checkpoint, linear = job.checkpoint, task.linear
    if task.bias is not None:
        writer.add(task.written_name, read_bias(checkpoint, task.bias))
        return {}
    if linear is None and task.tensor in results.equalized:
        writer.add(task.tensor, results.equalized[task.tensor].weight)
        return {}
    if linear is None:
        info = checkpoint.tensors[task.tensor]
        dtype, chunks = read_kept(checkpoint, info)
        writer.add_chunks(task.tensor, dtype, info.shape, chunks)
        return {}
    if not task.is_quantized:
        values = read_linear(checkpoint, linear, 0, linear.n)
        refuse_non_finite(checkpoint, linear.tensor, values)
        wide = values.dtype == torch.float32 and checkpoint.tensors[linear.tensor].dtype.itemsize == 1
        writer.add(task.written_name, values.to(torch.bfloat16) if wide else values)
        return {}
    inputs, read_calibrated_weight = results.inputs.get(linear.module), results.solved.get(linear.module)
    solved = None if read_calibrated_weight is None else read_calibrated_weight()
    if solved is None:
        shared = results.shared.get(linear.module, {})
        quantized = job.quantizer.quantize(checkpoint, linear, task.spec, shared)
    else:
        quantized = solved.quantized
    for name, tensor in job.convention.tensors(linear.module, quantized.weight, inputs).items():
        writer.add(name, tensor)
    measured = {
        "shape": [linear.n, linear.k],
        "format": spec_to_json(task.spec),
        "relative_error": rounded(quantized.relative_error),
        "squared_error": rounded(quantized.squared_error),
        "squared_norm": rounded(quantized.squared_norm),
    }
    norm = results.norm_of(linear.module)
    if norm is not None:
        measured[SCALED_BY] = norm
    if solved is not None:
        measured["output_error"] = {
            "data_free": rounded(solved.before),
            "calibrated": rounded(solved.after),
        }
    return {linear.module: measured}


def rounded(value: float) -> float:
    return float(f"{value:.{ERROR_DIGITS}g}")


def write_rest(
    job: QuantizeJob, record: WorkRecord, shards: Mapping[str, list[WeightTask]], copied: Mapping[str, Path]
) -> None:
    """Write all files except the shards: the index, the config and the files that are copied."""
    folder = record.folder
    if len(shards) > 1:
        _write_index(folder, list(shards))
    for name, path in copied.items():
        if parent_leads_out(folder, name):
            raise UserError(
                f"{folder / name} leads out of the folder through a symlink; give another folder with --out"
            )
        with atomic_path(folder / name) as partial:
            shutil.copyfile(path, partial)
    checkpoint = job.checkpoint
    config = without_heads(checkpoint.config, checkpoint.left_out, checkpoint.tensors)
    for section in (SECTION, OLD_SECTION, MLX_SECTION):
        config.pop(section, None)
    if job.tasks.untied or _is_wrongly_tied(job):
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict) and "tie_word_embeddings" in config["text_config"]:
            config["text_config"] = config["text_config"] | {"tie_word_embeddings": False}
    if job.quantization_config:
        config[SECTION] = job.quantization_config
    write_json(folder / CONFIG_NAME, config)
    for name, content in job.convention.sidecars(job.quantization_config).items():
        write_json(folder / name, content)


def _is_wrongly_tied(job: QuantizeJob) -> bool:
    """Say whether the config ties an output projection that has other weights, which some readers would
    drop.
    """
    if job.tasks.own_head is None:
        return False
    config = model_config(job.checkpoint)
    if not any(
        getattr(c, "tie_word_embeddings", False) for c in (config, config.get_text_config(decoder=True))
    ):
        return False
    head, embeddings = (job.checkpoint.tensors[name] for name in job.tasks.own_head)
    return head.name.removesuffix(".weight") in job.tasks.specs or not hold_the_same(head, embeddings)


def _write_index(folder: Path, names: list[str]) -> None:
    headers = {name: read_header(folder / name) for name in names}
    total = sum(info.nbytes for header in headers.values() for info in header.tensors.values())
    weight_map = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_NAME, index)
