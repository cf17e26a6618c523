"""KV pages on a GPU, stored and read by Triton kernels.

The CPU's pages are in `cpu.py`.

Pages are [P, H_kv, page, D], so that a head's tokens are contiguous: a page of 64 tokens with 128 channels is
16 KB in bf16.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...base.errors import UserError
from ...kernels.attention.append_kv import append_kv
from ...kernels.attention.choose_prefill import attend_prefill
from ...kernels.attention.decode import DecodeWorkspace, decode_attention
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.prefill import prefill_attention
from ...kernels.device import compute_capability, keeps_sums_in_registers
from .attention_metadata import AttentionMetadata, HostMetadata
from .layer import KVShape, PoolSize, StoredPages, Workspaces, widened

SMALLEST_PAGE = 16
E4M3_FROM = (8, 9)
"""The least compute capability with instructions for E4M3."""


class PrefillPages:
    """The pages of a step's prefill chunks, sent to the device once, by the first layer that asks."""

    def __init__(self) -> None:
        self._host: HostMetadata | None = None
        self._on_device: tuple[Tensor, Tensor] | None = None

    def of(self, host: HostMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the chunks' pages, int64 [P], and a block table, int32 [R, W], of indices into these
        pages.
        """
        if self._on_device is None or host is not self._host:
            # A step of padding alone, as warm-up has it, reads a page as well: the one that is nobody's.
            pages = [chunk.pages for chunk in host.requests(host.num_decodes)] or [np.zeros(1, np.int32)]
            counts = [len(numbers) for numbers in pages]
            table = np.zeros((host.num_decodes + len(counts), max(counts)), np.int32)
            ends = np.cumsum(counts)
            for row, (count, end) in enumerate(zip(counts, ends, strict=True), host.num_decodes):
                table[row, :count] = np.arange(end - count, end)
            self._host = host
            all_pages = torch.from_numpy(np.concatenate(pages).astype(np.int64))
            self._on_device = to_device(all_pages, device), to_device(torch.from_numpy(table), device)
        return self._on_device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor through pinned memory, so that the host need not wait for the steps in flight."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class CudaLayerKV:
    """One layer's pages, [P, H_kv, page, D] as the kernels need them."""

    def __init__(self, stored: StoredPages, shape: KVShape, size: PoolSize, workspaces: Workspaces):
        self.key_pages, self.value_pages = stored.key_pages, stored.value_pages
        self.key_scale, self.value_scale = stored.key_scale, stored.value_scale
        self._refuse_unsupported()
        heads, head_dim = shape.query_heads, shape.key_dim
        max_context, device = size.max_pages * size.page_size, stored.key_pages.device
        self._workspace = workspaces.get(
            (DecodeWorkspace, heads, head_dim),
            lambda: DecodeWorkspace.allocate(size.max_requests, heads, head_dim, max_context, device),
        )
        self._prefill_pages = workspaces.get(PrefillPages, PrefillPages)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        value_dim = value.shape[2]
        options = replace(options, sinks=sinks, key_scale=self.key_scale, value_scale=self.value_scale)
        # Narrower than the pages where queries and values differ in size, or are no power of two.
        query, key, value = (widened(x, self.key_pages.shape[3]) for x in (query, key, value))
        self._append(key, value, metadata.slot_mapping)
        query = query.contiguous()
        output = torch.empty_like(query)
        if metadata.host is None or metadata.host.num_decodes:
            self._decode(query, metadata, output, options)
        if metadata.prefill_tiles is not None:
            self._prefill(query, metadata, metadata.prefill_tiles, output, options)
        return output[..., :value_dim]

    def _decode(
        self, query: Tensor, metadata: AttentionMetadata, output: Tensor, options: AttentionOptions
    ) -> None:
        """Zeros are written for requests that do not decode; prefill attention overwrites its own rows
        later.
        """
        lengths = metadata.decode_seq_lens
        rows = min(len(query), len(lengths))
        pages = self.key_pages, self.value_pages, metadata.block_table
        if metadata.batch_invariance == "per-token":
            prefill_attention(query[:rows], *pages, lengths[:rows], options, output[:rows], one_form=True)
        else:
            decode_attention(query[:rows], *pages, lengths, self._workspace, options, output[:rows])

    def _append(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        key, value = (x if x.stride(1) == x.shape[2] else x.contiguous() for x in (key, value))
        append_kv(
            key,
            value,
            slot_mapping,
            self.key_pages,
            self.value_pages,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def _prefill(
        self,
        query: Tensor,
        metadata: AttentionMetadata,
        tiles: Tensor,
        output: Tensor,
        options: AttentionOptions,
    ) -> None:
        widened = None
        one_form = metadata.batch_invariance != "tuned"
        # mma.sync adds up operands of eight bits in another order than operands of sixteen.
        one_order = not keeps_sums_in_registers(compute_capability(query.device))
        # A step so large that it is no graph reads each page many times: eight bits are widened once.
        if metadata.host is not None and self.key_pages.element_size() == 1 and (one_order or not one_form):
            widened = self._prefill_pages.of(metadata.host, query.device)
        pages = self.key_pages, self.value_pages, metadata.block_table
        attend_prefill(query, *pages, tiles, options, output, one_form, widened)

    def _refuse_unsupported(self) -> None:
        refuse_page_size(self.key_pages.shape[2])
        if self.key_pages.dtype == torch.float8_e4m3fn:
            refuse_without_e4m3(self.key_pages.device, "fp8", "int8_per_token_head")


def refuse_without_e4m3(device: torch.device, name: str, instead: str) -> None:
    """Raise UserError if a KV format needs instructions for E4M3 that the GPU does not have."""
    if device.type == "cuda" and compute_capability(device) < E4M3_FROM:
        raise UserError(
            f"{name} keys and values need a GPU of compute capability {E4M3_FROM[0]}.{E4M3_FROM[1]} or "
            f"more, and {torch.cuda.get_device_name(device)} has less; use {instead}"
        )


def refuse_page_size(page_size: int) -> None:
    """Raise UserError if the kernels do not support pages of this number of tokens."""
    if page_size < SMALLEST_PAGE or page_size & (page_size - 1):
        raise UserError(
            f"pages of {page_size} tokens are not served on a GPU; "
            f"give a power of two from {SMALLEST_PAGE} on"
        )
