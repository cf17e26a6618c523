"""The pool of KV pages: every layer's storage, the free pages, and the block table of running requests.

The scheduler decides which request gets pages next.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from ...base.errors import UserError
from ...base.option_fields import flag
from ...layouts.kv.attention_chunks import ChunkedLayerKV, refuse_chunk
from ...layouts.kv.format import KV_FORMATS, KVFormat
from ...layouts.kv.layer import KVScales, LayerKV, PoolSize, Workspaces
from ...layouts.states.all_states import STATE_FORMATS
from ...layouts.states.cpu_slots import CpuStateSlots
from ...layouts.states.cuda_slots import CudaStateSlots
from ...layouts.states.state_format import StateKey, StateSlots
from .attention import AttentionLayer, ServedLayers
from .options import EngineOptions
from .sequence import Sequence

CPU_MEMORY_SHARE = 0.25
"""The pages' share of the memory that is free when the engine is built. They take none until written."""
CUDA_MEMORY_SHARE = 0.8
"""The pages' share of the free GPU memory; the rest is for activations."""


class KVPool:
    """Pages for all layers: page p belongs to the same request in every layer.

    Page 0 belongs to no request, and fills block tables after a request's last page.
    """

    def __init__(
        self,
        layers: ServedLayers,
        kv_format: KVFormat,
        scales: Mapping[int, KVScales],
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        max_pages = pages_for(max_model_len, page_size)
        size, workspaces = PoolSize(num_pages + 1, page_size, max_num_seqs, max_pages), Workspaces()
        self.layers: dict[int, LayerKV] = {
            index: kv_format.allocate(layer.shape, size, device, scales.get(index), workspaces)
            for index, layer in layers.attention.items()
        }
        for index, layer in layers.attention.items():
            if layer.chunk is not None and layer.chunk < max_model_len:
                refuse_chunk(layer.chunk, page_size, device)
                on_gpu = device.type == "cuda"
                self.layers[index] = ChunkedLayerKV(self.layers[index], layer.chunk, on_gpu, workspaces)
        """Each layer's storage, by the layer's index."""
        slots = CudaStateSlots if device.type == "cuda" else CpuStateSlots
        self.states: dict[StateKey, StateSlots] = {
            key: slots(STATE_FORMATS[key.name], shape, max_num_seqs, device)
            for key, shape in layers.states.items()
        }
        """The slots of layers that keep a state; a request uses the slot at its row."""
        self.block_table = np.zeros((max_num_seqs, max_pages), np.int32)
        """The pages of each running request by its row, followed by page 0."""
        self._free_pages = list(range(num_pages, 0, -1))
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free_pages) / self.num_pages

    def pages_for(self, length: int) -> int:
        return pages_for(length, self.page_size)

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a row, and pages for all its tokens. The caller must have checked that a row and
        enough pages are free.
        """
        sequence.row = self._free_rows.pop()
        self.grow(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Give the sequence the pages that its tokens need; False, with nothing changed, if there are not
        enough."""
        held, needed = len(sequence.pages), pages_for(len(sequence.tokens), self.page_size)
        if needed - held > len(self._free_pages):
            return False
        for index in range(held, needed):
            page = self._free_pages.pop()
            sequence.pages.append(page)
            self.block_table[sequence.row, index] = page
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back the sequence's row and pages; their content is lost."""
        if sequence.row is None:
            return
        self.block_table[sequence.row] = 0
        self._free_rows.append(sequence.row)
        self._free_pages.extend(reversed(sequence.pages))
        sequence.row, sequence.pages, sequence.num_computed = None, [], 0


def pages_for(length: int, page_size: int) -> int:
    return -(-length // page_size)


def build_pool(
    layers: ServedLayers,
    options: EngineOptions,
    max_model_len: int,
    scales: Mapping[int, KVScales],
    device: torch.device,
) -> KVPool:
    """Return an engine's pool, as large as its options say or its memory allows."""
    kv_format = KV_FORMATS[options.kv_format]
    page_size = options.page_size or kv_format.page_size(device)
    num_pages = pages_asked(layers, options, max_model_len, device)
    return KVPool(
        layers,
        kv_format,
        scales,
        num_pages,
        page_size,
        options.max_num_seqs,
        max_model_len,
        device,
    )


def pages_asked(
    layers: ServedLayers, options: EngineOptions, max_model_len: int, device: torch.device
) -> int:
    """Return the pages of the pool of an engine with these options. A device without room for the pages
    raises UserError.
    """
    kv_format = KV_FORMATS[options.kv_format]
    return pool_pages(
        layers.attention,
        kv_format,
        options.page_size or kv_format.page_size(device),
        options.kv_cache_tokens,
        options.max_num_seqs,
        max_model_len,
        device,
        layers.state_bytes,
    )


def pool_pages(
    layers: dict[int, AttentionLayer],
    kv_format: KVFormat,
    page_size: int,
    kv_cache_tokens: int | None,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    state_bytes: int = 0,
) -> int:
    """Return the number of pages: for kv_cache_tokens if given, else for max_num_seqs full contexts or as
    many as fit.

    state_bytes: bytes of a request's states in all layers
    """
    full_context = pages_for(max_model_len, page_size)
    page_bytes, row_bytes = stored_bytes(layers, kv_format, page_size)
    room = _Room(free_memory(device), max_num_seqs, row_bytes + state_bytes, state_bytes, device)
    if kv_cache_tokens is not None:
        num_pages = kv_cache_tokens // page_size
        origin = f"kv_cache_tokens={kv_cache_tokens}"
        room.require(num_pages * page_bytes, f"a KV pool of {kv_cache_tokens} tokens")
    else:
        share = CUDA_MEMORY_SHARE if device.type == "cuda" else CPU_MEMORY_SHARE
        if room.kept:
            asks = f"a KV pool of {max_model_len} tokens (in {share:.0%} of the memory left to it)"
            room.require(int(full_context * page_bytes / share), asks)
        memory = int(room.for_pages * share)
        num_pages = max_num_seqs * full_context
        # Without attention, pages take nothing, and bound nothing but the length of a request.
        if page_bytes:
            num_pages = min(num_pages, memory // page_bytes)
        origin = f"{memory / 2**30:.1f} GiB of {device.type} memory"
    if num_pages < full_context:
        raise UserError(
            f"the KV pool is too small for one full-length request: {origin} holds {num_pages} "
            f"page{'' if num_pages == 1 else 's'} of {page_size} tokens, and max_model_len is "
            f"{max_model_len}. Lower max_model_len, or give the pool more tokens"
            f"{_smaller_pages(page_size, kv_cache_tokens, max_model_len, device)}."
        )
    return num_pages


@dataclass(frozen=True)
class _Room:
    """The memory for a pool, and the memory that its requests take besides pages."""

    free: int
    max_num_seqs: int
    request_bytes: int
    """Bytes of a request in all layers besides its pages."""
    state_bytes: int
    """Of these, the states of recurrent layers."""
    device: torch.device

    @property
    def kept(self) -> int:
        """Return the bytes for all rows; the last row is for padding."""
        return (self.max_num_seqs + 1) * self.request_bytes

    @property
    def for_pages(self) -> int:
        return self.free - self.kept

    def require(self, page_bytes: int, why: str) -> None:
        """Raise UserError if pages of this many bytes do not fit beside the memory that requests take
        otherwise.

        why: the option or the limit that requires the pages
        """
        if page_bytes <= self.for_pages:
            return
        kept, fewer = "", 0
        if self.request_bytes:
            what = "the states of recurrent layers" if self.state_bytes else "what is stored besides pages"
            kept = f", of which {what} take {self.request_bytes / 2**20:.2f} MiB a request"
            fewer = (self.free - page_bytes) // self.request_bytes - 1
        some = f"at most {fewer} requests at once" if fewer > 0 else "fewer requests at once"
        raise UserError(
            f"{why} for {flag('max_num_seqs')} {self.max_num_seqs} takes "
            f"{(page_bytes + self.kept) / 2**30:.1f} GiB of {self.device.type} memory{kept}; "
            f"{self.free / 2**30:.1f} GiB are free. Serve {some}, or shorter requests."
        )


def stored_bytes(
    layers: Mapping[int, AttentionLayer], kv_format: KVFormat, page_size: int
) -> tuple[int, int]:
    """Return the bytes of a page, and of a request's state besides its pages, in all layers."""
    shapes = [layer.shape for layer in layers.values()]
    return (
        sum(kv_format.bytes_per_page(shape, page_size) for shape in shapes),
        sum(kv_format.bytes_per_request(shape) for shape in shapes),
    )


def _smaller_pages(
    page_size: int, kv_cache_tokens: int | None, max_model_len: int, device: torch.device
) -> str:
    """Return advice to use KV formats with smaller pages, if a full context would fit with them; else
    empty.
    """
    sizes = {name: kv_format.page_size(device) for name, kv_format in KV_FORMATS.items()}
    enough = [
        name
        for name, size in sizes.items()
        if size < page_size and (kv_cache_tokens or 0) // size >= pages_for(max_model_len, size)
    ]
    return f", or choose a KV format with smaller pages: {', '.join(enough)}" if enough else ""


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that are free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
