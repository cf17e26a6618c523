"""A preview of a quantize job, with an estimate of its time and memory: `quantize --dry-run`.

A block of each format is quantized to time it; nothing is written.
"""

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ...layouts.formats.weight_format import WeightFormat
from .job import QuantizeJob
from .quantizers.all_quantizers import QUANTIZERS
from .quantizers.quantizer import SharingQuantizer, WeighingQuantizer
from .shards.tasks import WeightTask, source_bytes
from .shards.weight_tensors import CPU_BLOCK, GPU_BLOCK
from .solvers.importance import importance_of_columns
from .write_shards import output_bytes

SAMPLE = 1 << 20
"""Number of weights in the block that is timed."""
FP32_COPIES = 6
"""How many fp32 copies of a block a search for scales holds at once."""


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes. `seconds` and `memory` are estimates; a text that is read comes on top of both."""

    formats: Mapping[str, int]
    """Number of quantized modules for each format, by its label."""
    kept: int
    """Number of tensors that stay unquantized."""
    bytes_read: int
    bytes_written: int
    shards: int
    seconds: float
    memory: int
    free: int
    """Free bytes on the disk that is written to."""
    kv_cache: str
    """The format of keys and values."""
    text: str | None
    """The name of the text that is read; None if none is read."""


def estimate(job: QuantizeJob, shards: Mapping[str, list[WeightTask]], folder: Path) -> Estimate:
    """Estimate for the whole job from its beginning, in one process on the job's device."""
    tasks = job.tasks.in_order
    numbers: Counter[WeightFormat] = Counter()
    for task in tasks:
        if task.linear is not None and task.is_quantized:
            numbers[task.spec] += task.linear.n * task.linear.k
    block = CPU_BLOCK if job.quantizer.device.type == "cpu" else GPU_BLOCK
    largest = max((t.linear.n * t.linear.k for t in tasks if t.linear and t.is_quantized), default=0)
    written = [output_bytes(job.checkpoint, task) for task in tasks]
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    return Estimate(
        formats={spec.label: count for spec, count in Counter(job.tasks.specs.values()).most_common()},
        kept=sum(not task.is_quantized for task in tasks),
        bytes_read=sum(source_bytes(job.checkpoint, task) for task in tasks),
        bytes_written=sum(written),
        shards=len(shards),
        seconds=sum(count * _seconds_a_number(spec, job) for spec, count in numbers.items()),
        memory=psutil.Process().memory_info().rss
        + max(written, default=0)
        + FP32_COPIES * 4 * min(block, largest),
        free=shutil.disk_usage(there).free,
        kv_cache=job.recipe.kv_cache,
        text=None if job.text is None else job.text.name,
    )


def _seconds_a_number(spec: WeightFormat, job: QuantizeJob) -> float:
    """Return the time of quantizing random weights of `spec`, after a first call that loads modules."""
    quantizer, device = QUANTIZERS[spec.name], job.quantizer.device
    k = next(k for module, (_, k) in job.tasks.shapes.items() if job.tasks.specs[module] == spec)
    values = torch.randn(max(8, SAMPLE // k // 8 * 8), k, device=device, dtype=torch.bfloat16)
    shared = (
        quantizer.shared_tensors(spec, quantizer.measure(values))
        if isinstance(quantizer, SharingQuantizer)
        else {}
    )
    shared = {name: tensor.to(device) for name, tensor in shared.items()}
    seconds = 0.0
    for rows in (values[:8], values):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        if isinstance(quantizer, WeighingQuantizer):
            quantizer.quantize_weighted(rows, spec, importance_of_columns([rows]).to(device))
        else:
            quantizer.quantize(rows, spec, job.quantizer.scale_dtype, shared)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return seconds / values.numel()
