"""KV pages with fewer than eight bits on the CPU, for formats that quantize each token by itself.

Formats that quantize whole pages are elsewhere: KVarN's are in `kvarn/cpu.py`.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.attention import reference
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.reference import TokenGroup
from ...kernels.hadamard import rotate_reference
from .attention_metadata import AttentionMetadata
from .cpu import TokenGroups, on_host, with_padding
from .layer import Workspaces, widened


class TokenCode(Protocol):
    """How a layer's keys, or its values, are quantized, each token and head by itself."""

    @property
    def dim(self) -> int:
        """The number of channels stored per head: a power of two, to which heads are padded."""

    def allocate(self, pages: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Allocate storage for (pages, P, H_kv) on the CPU, or (pages, H_kv, P) on CUDA; its content is
        finite.
        """

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """Quantize x [T, H_kv, dim] to the parts that are stored, [T, H_kv, ...]."""

    def dequantize(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Dequantize parts [..., H_kv, ...] to fp32 [..., H_kv, dim]."""


class CodedCpuLayerKV:
    """One layer's pages: for keys and for values, [pages, P, H_kv, ...] for each part of the code."""

    def __init__(
        self,
        codes: tuple[TokenCode, TokenCode],
        pages: tuple[int, ...],
        rotated: bool,
        workspaces: Workspaces,
    ):
        """rotated: keys and values are multiplied by a Hadamard matrix before they are stored."""
        self.codes = codes
        self.stored = tuple(code.allocate(pages, torch.device("cpu")) for code in codes)
        self.rotated = rotated
        self._groups = workspaces.get(TokenGroups, TokenGroups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        count, padded, value_dim, dtype = (
            on_host(metadata).num_tokens,
            len(query),
            value.shape[2],
            query.dtype,
        )
        slots = metadata.slot_mapping[:count]
        query, key, value = (self._turned(widened(x[:count], self.codes[0].dim)) for x in (query, key, value))
        for code, stored, new in zip(self.codes, self.stored, (key, value), strict=True):
            for pages, part in zip(stored, code.quantize(new), strict=True):
                _as_bytes(pages).flatten(0, 1).index_copy_(0, slots, _as_bytes(part))

        def gather(group: TokenGroup) -> tuple[Tensor, Tensor]:
            which = group.pages.view(-1)
            key, value = (
                code.dequantize(tuple(_select(pages, which) for pages in stored)).to(dtype)
                for code, stored in zip(self.codes, self.stored, strict=True)
            )
            return key, value

        query = query.to(dtype)
        groups = self._groups.of(metadata, options.sliding_window, query)
        output = self._turned(reference.attend_over(query, groups, gather, replace(options, sinks=sinks)))
        return with_padding(output[..., :value_dim].to(dtype), padded)

    def _turned(self, x: Tensor) -> Tensor:
        return rotate_reference(x) if self.rotated else x


def _as_bytes(x: Tensor) -> Tensor:
    """View E4M3 as bytes, since torch cannot copy E4M3 by index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _select(pages: Tensor, which: Tensor) -> Tensor:
    return _as_bytes(pages).index_select(0, which).view(pages.dtype)
