"""Times storing and attending in a decode step, for each KV format and for unquantized keys and values.

The timing uses the formats' own storage, at the contexts and batch sizes that are served. Quality is measured
elsewhere, and so are products, which do not depend on the KV format.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....base.progress import progress_bar
from ....layouts.choosing.plan import KVMeasurement
from ....layouts.choosing.timing import TimingBudget, interleaved_microseconds
from ....layouts.kv.format import KV_FORMATS, KVFormat
from ..attention import AttentionLayer, ServedLayers
from ..kv_pool import KVPool, free_memory, pages_for
from ..options import UNQUANTIZED
from ..request import SamplingParams
from ..sequence import Sequence as Request
from ..step_input import StepBuffers

MEMORY_SHARE = 0.2
"""The share of free memory for keys and values at one M and context, of all formats together."""
CPU_BUDGET = TimingBudget(samples=6, sample_seconds=0.0, seconds=0.3, warmup_calls=1)
GPU_BUDGET = TimingBudget(samples=16, seconds=0.2)
FULL_PAGE = " with a page that becomes full"


def time_kv_formats(
    layers: Mapping[int, AttentionLayer],
    formats: Sequence[str],
    contexts: Sequence[int],
    ms: Sequence[int],
    device: torch.device,
    progress: bool = True,
) -> tuple[KVMeasurement, ...]:
    """Return microseconds of a decode step over all `layers`, for every format, context (in tokens) and M.

    A step in which pages become full is timed separately and enters the mean once per page of tokens. Pairs
    of context and M that do not fit in memory are left out.
    """
    names = [UNQUANTIZED, *(name for name in formats if name != UNQUANTIZED)]
    kinds = Counter(layers.values())
    found: list[KVMeasurement] = []
    cells = [(context, m) for context in sorted(contexts) for m in sorted(ms)]
    for context, m in progress_bar(cells, desc="timing KV formats", shown=progress):
        if _bytes(kinds, names, context, m, device) > MEMORY_SHARE * free_memory(device):
            continue
        plain, full = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for layer, count in kinds.items():
            timed = _time(layer, names, context, m, device)
            for name in names:
                plain[name] += count * timed[name]
                full[name] += count * max(timed[name], timed[name + FULL_PAGE])
        mean = {name: _over_a_page(plain[name], full[name], name, device) for name in names}
        found += [
            KVMeasurement(name, context, m, mean[name], mean[UNQUANTIZED], plain[name], full[name])
            for name in names[1:]
        ]
    return tuple(found)


def _over_a_page(plain: float, full: float, name: str, device: torch.device) -> float:
    """Return the mean time of a step. Of as many steps as a page has tokens, one completes a page."""
    return plain + (full - plain) / KV_FORMATS[name].page_size(device)


def _time(
    layer: AttentionLayer, names: Sequence[str], context: int, m: int, device: torch.device
) -> dict[str, float]:
    """Return microseconds of one layer's step by format, and of a step in which every page becomes full."""
    calls: dict[str, Callable[[int], object]] = {}
    for name in names:
        stored = KV_FORMATS[name]
        end = _whole_pages(stored, context, device) * stored.page_size(device)
        calls[name] = _step(layer, stored, end - 1, m, device)
        calls[name + FULL_PAGE] = _step(layer, stored, end, m, device)
    budget = GPU_BUDGET if device.type == "cuda" else CPU_BUDGET
    with torch.inference_mode():
        return interleaved_microseconds(calls, 1, device, budget)


def _step(
    layer: AttentionLayer, stored: KVFormat, length: int, m: int, device: torch.device
) -> Callable[[int], Tensor]:
    """Return a decode step of M requests whose contexts have `length` tokens, including the new one."""
    shape, page_size = layer.shape, stored.page_size(device)
    pages = pages_for(length, page_size)
    pool = KVPool(ServedLayers({0: layer}), stored, {}, m * pages, page_size, m, pages * page_size, device)
    for tensor in _tensors(pool.layers[0]):
        # Untouched memory is backed by a single page of zeros, which would be read from the nearest cache.
        tensor.view(torch.uint8).zero_()
    requests = [Request(str(row), [0] * length, length, SamplingParams(), 0, length + 1) for row in range(m)]
    for request in requests:
        pool.admit(request)
    on_gpu = device.type == "cuda"
    buffers = StepBuffers(pool.block_table, page_size, m, device, static=on_gpu)
    step = buffers.decode_shape(m)
    host = buffers.stage(requests, [], step)
    buffers.send(step, m)
    metadata = buffers.input(step, None if on_gpu else host).attention
    like = torch.empty(0, dtype=shape.dtype, device=device)
    query = like.new_empty(m, shape.query_heads, shape.key_dim).normal_()
    key = like.new_empty(m, shape.heads, shape.key_dim).normal_()
    value = like.new_empty(m, shape.heads, shape.value_dim).normal_()

    def call(copy: int) -> Tensor:
        # Keeps the buffers alive: the metadata are views of them.
        _ = buffers
        return pool.layers[0].forward(query, key, value, metadata, layer.options, None)

    return call


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a layer's storage, including tensors in nested dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) or hasattr(value, "forward"):
        for part in vars(value).values():
            yield from _tensors(part)


def _whole_pages(stored: KVFormat, context: int, device: torch.device) -> int:
    return pages_for(context, stored.page_size(device))


def _bytes(
    kinds: Mapping[AttentionLayer, int], names: Sequence[str], context: int, m: int, device: torch.device
) -> int:
    """Return the bytes of all formats' storage together, for the largest kind of layer. Each format is stored
    twice.
    """
    return 2 * max(
        sum(
            m * _whole_pages(stored, context, device)
            * stored.bytes_per_page(layer.shape, stored.page_size(device))
            + (m + 1) * stored.bytes_per_request(layer.shape)
            for stored in map(KV_FORMATS.__getitem__, names)
        )
        for layer in kinds
    )  # fmt: skip
