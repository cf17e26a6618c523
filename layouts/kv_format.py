"""The KV format seam: how one layer's keys and values lie in pages, and how queries read them there.

Not for which request owns which page; that is the engine's KV pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import paged_attention
from ..kernels.decode_attention import DecodeWorkspace
from ..kernels.paged_attention import AttentionOptions, TokenGroup
from .registry import Registry


@dataclass(frozen=True)
class KVShape:
    """What one token leaves behind in one layer."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass
class DecodeTokens:
    """Where a decode step's tokens lie: one query token for each request."""

    slots: Tensor
    """int64 [B]: page * P + offset, where each new token's key and value go."""
    block_table: np.ndarray
    """int64 [B, pages of the longest request], page 0 past a request's end."""
    lengths: np.ndarray
    """int64 [B], the new token counted."""
    rows: np.ndarray
    """int64 [B], the row that each request has while it runs."""
    page_size: int
    _groups: dict[int | None, list[TokenGroup]] = field(default_factory=dict)

    def groups(self, window: int | None, like: Tensor) -> list[TokenGroup]:
        """Built for the step's first layer with this window, shared by the others."""
        if window not in self._groups:
            self._groups[window] = paged_attention.decode_groups(
                self.block_table, self.lengths, self.page_size, window, like
            )
        return self._groups[window]


@dataclass(frozen=True)
class PromptPiece:
    """Some consecutive tokens of one prompt, and the pages that its whole context lies in."""

    start: int
    count: int
    pages: np.ndarray
    """int64 [pages]."""
    row: int
    """The row that its request has while it runs."""


@dataclass
class PrefillTokens:
    """Where a prefill chunk's tokens lie: pieces of prompts, packed one after another."""

    slots: Tensor
    """int64 [T]."""
    pieces: list[PromptPiece]
    page_size: int
    _groups: dict[int | None, list[TokenGroup]] = field(default_factory=dict)

    def groups(self, window: int | None, like: Tensor) -> list[TokenGroup]:
        if window not in self._groups:
            groups, first_token = [], 0
            for piece in self.pieces:
                groups.append(
                    paged_attention.prefill_group(
                        first_token, piece.start, piece.count, piece.pages, self.page_size, window, like
                    )
                )
                first_token += piece.count
            self._groups[window] = groups
        return self._groups[window]


@dataclass
class DeviceDecodeTokens:
    """A decode step's tokens at addresses on the GPU that never change: what a CUDA graph reads."""

    slots: Tensor
    """int64 [B], -1 for a row that only pads the batch."""
    block_table: Tensor
    """int32 [B, W]."""
    lengths: Tensor
    """int32 [B], the new token counted, 0 for a padding row."""
    rows: Tensor
    """int64 [B], any stride: the row that each request has while it runs."""
    max_context: int
    """The longest context that `block_table` can name, in tokens."""
    workspaces: dict[tuple[int, int], DecodeWorkspace]
    """The attention kernel's scratch by (query heads, head size), shared by all layers and batch sizes."""


class PieceContexts:
    """The pages that a step's pieces attend to; on the device from the first layer on that asks for them."""

    def __init__(self, first_row: int, pages: Sequence[np.ndarray]):
        """pages: of each piece, in the order of its context, int [n]. first_row: of the block table."""
        self.first_row = first_row
        self.pages = pages
        self._on_device: tuple[Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of the pages, int64 [P], and a block table, int32 [R, W], of their places among these."""
        if self._on_device is None:
            counts = [len(pages) for pages in self.pages]
            table = np.zeros((self.first_row + len(counts), max(counts)), np.int32)
            for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True), self.first_row):
                table[row, :count] = np.arange(end - count, end)
            all_pages = np.concatenate(self.pages).astype(np.int64)
            self._on_device = torch.from_numpy(all_pages).to(device), torch.from_numpy(table).to(device)
        return self._on_device


@dataclass(frozen=True)
class PackedTokens:
    """A step on a GPU: decoding requests, then pieces of prompts, then padding; what a CUDA graph reads."""

    slots: Tensor
    """int64 [T], -1 for padding."""
    decode: DeviceDecodeTokens
    """A row for each decoding request, then one for each piece, whose length is 0 there; B is at most T."""
    tiles: Tensor
    """int32 [N, 4], all that is not decoding, as `kernels/prefill_attention.py` takes it."""
    contexts: PieceContexts | None = None
    """Of a step so large that it is no graph; None in a graph, whose pieces differ from launch to launch."""


StepTokens = DecodeTokens | PrefillTokens | DeviceDecodeTokens | PackedTokens


@dataclass(frozen=True)
class KVScales:
    """What one layer's keys and values are divided by before e4m3 holds them."""

    key: Tensor
    """fp32 [1] for all heads, or [H_kv]."""
    value: Tensor


@dataclass(frozen=True)
class PoolSize:
    """How much every layer's storage holds."""

    num_pages: int
    page_size: int
    """Tokens a page holds."""
    max_requests: int
    """Requests that have a row at the same time; row `max_requests` belongs to none, and pads batches."""


class LayerKV(Protocol):
    """One layer's pages in one format."""

    def append(self, key: Tensor, value: Tensor, tokens: StepTokens) -> None:
        """Store key [T, H_kv, D] and value [T, H_kv, D_v] at tokens.slots."""

    def attend(
        self, query: Tensor, tokens: StepTokens, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """[T, H, D] → [T, H, D_v], over everything stored so far, this step's tokens included.

        Over what is stored, never over what it was made from: then no output depends on how a prompt was
        cut into chunks, nor on whether a request was preempted.
        """


class KVFormat(Protocol):
    """How tokens' keys and values are stored. A request has pages, and a row of its own while it runs."""

    def bytes_per_token(self, shape: KVShape) -> int:
        """What one token takes in one layer's pages."""

    def bytes_per_request(self, shape: KVShape) -> int:
        """What one layer keeps for each row beside the pages: tokens not quantized yet, or never."""

    def page_size(self, device: torch.device) -> int:
        """Tokens a page holds, unless the engine is told otherwise."""

    def allocate(
        self, shape: KVShape, size: PoolSize, device: torch.device, scales: KVScales | None
    ) -> LayerKV:
        """Storage for one layer. What it holds at first must be finite: masked keys are still multiplied.

        scales: the checkpoint's, where it has any
        """


@dataclass(frozen=True)
class StoredPages:
    """One layer's keys and values with their scales, in the order of dimensions that the device wants.

    On the CPU [pages, P, H_kv, D] with scales [H_kv] or [pages, P, H_kv]; on CUDA H_kv before P.
    """

    key_pages: Tensor
    value_pages: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


class CpuLayerKV:
    """Pages on the CPU, read and written by the torch reference."""

    def __init__(self, stored: StoredPages):
        self.stored = stored

    def append(self, key: Tensor, value: Tensor, tokens: StepTokens) -> None:
        stored = self.stored
        paged_attention.append(stored.key_pages, key, tokens.slots, stored.key_scale)
        paged_attention.append(stored.value_pages, value, tokens.slots, stored.value_scale)

    def attend(
        self, query: Tensor, tokens: StepTokens, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        if not isinstance(tokens, DecodeTokens | PrefillTokens):
            raise TypeError("pages on the CPU take DecodeTokens and PrefillTokens")
        stored = self.stored
        return paged_attention.attend(
            query,
            stored.key_pages,
            stored.value_pages,
            tokens.groups(options.sliding_window, query),
            options,
            sinks,
            stored.key_scale,
            stored.value_scale,
        )


CPU_PAGE, CUDA_PAGE = 16, 64


@dataclass(frozen=True)
class TokenByToken:
    """Every token of every head is stored by itself, as it is or in eight bits.

    dtype: None is the model's own; e4m3 has a scale for each head that never changes, the checkpoint's or 1;
    int8 one for each token and head, which is stored beside it
    """

    dtype: torch.dtype | None = None

    def bytes_per_token(self, shape: KVShape) -> int:
        dtype = self.dtype or shape.dtype
        scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
        return shape.heads * ((shape.key_dim + shape.value_dim) * dtype.itemsize + scales)

    def bytes_per_request(self, shape: KVShape) -> int:
        return 0

    def page_size(self, device: torch.device) -> int:
        return CUDA_PAGE if device.type == "cuda" else CPU_PAGE

    def allocate(
        self, shape: KVShape, size: PoolSize, device: torch.device, scales: KVScales | None
    ) -> LayerKV:
        dtype = self.dtype or shape.dtype
        on_cuda = device.type == "cuda"
        tokens = (size.page_size, shape.heads)
        pages = (size.num_pages, *(reversed(tokens) if on_cuda else tokens))
        stored = StoredPages(
            _zeros((*pages, shape.key_dim), dtype, device),
            _zeros((*pages, shape.value_dim), dtype, device),
            self._scale(pages, shape, device, None if scales is None else scales.key),
            self._scale(pages, shape, device, None if scales is None else scales.value),
        )
        if on_cuda:
            # Imported here because it builds on this file, and only where there is a GPU to need it.
            from .kv_cuda import CudaLayerKV

            return CudaLayerKV(stored)
        return CpuLayerKV(stored)

    def _scale(
        self, pages: tuple[int, ...], shape: KVShape, device: torch.device, given: Tensor | None
    ) -> Tensor | None:
        if self.dtype == torch.int8:
            return _zeros(pages, torch.float32, device)
        if self.dtype == torch.float8_e4m3fn:
            ones = torch.ones(shape.heads, dtype=torch.float32, device=device)
            return ones if given is None else ones * given.to(device, torch.float32).view(-1)
        return None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no CPU memory until they are written: torch.zeros touches every byte, calloc none."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


KV_FORMATS: Registry[KVFormat] = Registry("KV format")
KV_FORMATS.add("unquantized", TokenByToken())
KV_FORMATS.add("fp8", TokenByToken(torch.float8_e4m3fn))
KV_FORMATS.add("int8_per_token_head", TokenByToken(torch.int8))
