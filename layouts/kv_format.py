"""The KV format seam: how one layer's keys and values lie in pages, and how queries read them there.

Not for which request owns which page; that is the engine's KV pool.
"""

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


@dataclass(frozen=True)
class PackedPieces:
    """A prefill chunk's pieces on a GPU, one after another, as flash attention takes them."""

    query_starts: Tensor
    """int32 [pieces + 1], in the chunk's tokens."""
    context_starts: Tensor
    """int32 [pieces + 1], in the tokens of all contexts, one after another."""
    context_pages: Tensor
    """int64 [tokens of all contexts], the page of each."""
    context_offsets: Tensor
    """int64, alike: its place in the page."""
    longest_query: int
    longest_context: int

    @classmethod
    def of(cls, pieces: list[PromptPiece], page_size: int, device: torch.device) -> "PackedPieces":
        counts = [piece.count for piece in pieces]
        lengths = [piece.start + piece.count for piece in pieces]
        positions = [np.arange(length) for length in lengths]
        pages = [piece.pages[where // page_size] for piece, where in zip(pieces, positions, strict=True)]
        starts = np.cumsum([0, *counts]), np.cumsum([0, *lengths])

        def column(values: np.ndarray, dtype: type) -> Tensor:
            # Pinned: from pageable memory the copy would wait for all that the device is doing.
            return torch.from_numpy(values.astype(dtype)).pin_memory().to(device, non_blocking=True)

        return cls(
            column(starts[0], np.int32),
            column(starts[1], np.int32),
            column(np.concatenate(pages), np.int64),
            column(np.concatenate(positions) % page_size, np.int64),
            max(counts),
            max(lengths),
        )


@dataclass
class PrefillTokens:
    """Where a prefill chunk's tokens lie: pieces of prompts, packed one after another."""

    slots: Tensor
    """int64 [T]."""
    pieces: list[PromptPiece]
    page_size: int
    _groups: dict[int | None, list[TokenGroup]] = field(default_factory=dict)
    _packed: PackedPieces | None = None

    def packed(self, device: torch.device) -> PackedPieces:
        """Built for the step's first layer, shared by the others."""
        if self._packed is None:
            self._packed = PackedPieces.of(self.pieces, self.page_size, device)
        return self._packed

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
    max_context: int
    """The longest context that `block_table` can name, in tokens."""
    workspaces: dict[tuple[int, int], DecodeWorkspace]
    """The attention kernel's scratch by (query heads, head size), shared by all layers and batch sizes."""


StepTokens = DecodeTokens | PrefillTokens | DeviceDecodeTokens


class LayerKV(Protocol):
    """One layer's pages in one format."""

    def append(self, key: Tensor, value: Tensor, tokens: StepTokens) -> None:
        """Store key [T, H_kv, D] and value [T, H_kv, D_v] at tokens.slots."""

    def attend(
        self, query: Tensor, tokens: StepTokens, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """[T, H, D] → [T, H, D_v], over everything stored so far, this step's tokens included."""


class KVFormat(Protocol):
    """How a token's keys and values are stored."""

    def bytes_per_token(self, shape: KVShape) -> int:
        """What one token takes in one layer."""

    def allocate(self, num_pages: int, page_size: int, shape: KVShape, device: torch.device) -> LayerKV:
        """Pages for one layer. What they hold at first must be finite: masked keys are still multiplied."""


class UnquantizedLayerKV:
    """Pages in the dtype that the model computes keys and values in."""

    def __init__(self, num_pages: int, page_size: int, shape: KVShape, device: torch.device):
        self.key_pages = _zeros((num_pages, page_size, shape.heads, shape.key_dim), shape.dtype, device)
        self.value_pages = _zeros((num_pages, page_size, shape.heads, shape.value_dim), shape.dtype, device)

    def append(self, key: Tensor, value: Tensor, tokens: StepTokens) -> None:
        paged_attention.append(self.key_pages, self.value_pages, key, value, tokens.slots)

    def attend(
        self, query: Tensor, tokens: StepTokens, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        if isinstance(tokens, DeviceDecodeTokens):
            raise TypeError("pages on the CPU take DecodeTokens")
        groups = tokens.groups(options.sliding_window, query)
        return paged_attention.attend(query, self.key_pages, self.value_pages, groups, options, sinks)


class Unquantized:
    """Keys and values as the model computes them."""

    def bytes_per_token(self, shape: KVShape) -> int:
        return shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int, shape: KVShape, device: torch.device) -> LayerKV:
        if device.type == "cuda":
            # Imported here because it builds on this file, and only where there is a GPU to need it.
            from .kv_cuda import CudaLayerKV

            return CudaLayerKV(num_pages, page_size, shape, device)
        return UnquantizedLayerKV(num_pages, page_size, shape, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no CPU memory until they are written: torch.zeros touches every byte, calloc none."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


KV_FORMATS: Registry[KVFormat] = Registry("KV format")
KV_FORMATS.add("unquantized", Unquantized())
