"""KV pages on a GPU, where Triton kernels store and read them.

Not for the CPU, whose pages and products are in `kv_format.py`.

Pages lie as [P, H_kv, page, D], so that one head's tokens are consecutive and a page of 64 tokens of 128
channels is one run of 16 KB in bf16.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.append_kv import append_kv
from ..kernels.decode_attention import DecodeWorkspace, compute_capability, decode_attention
from ..kernels.paged_attention import AttentionOptions
from ..kernels.prefill_attention import prefill_attention
from ..kernels.widen_pages import widen_pages
from .errors import UserError
from .kv_format import DeviceDecodeTokens, PackedTokens, StepTokens, StoredPages

SMALLEST_PAGE = 16
E4M3_FROM = (8, 9)
"""The compute capability that has instructions for it."""


class CudaLayerKV:
    """One layer's pages, [P, H_kv, page, D] as the kernels take them."""

    def __init__(self, stored: StoredPages):
        self.key_pages, self.value_pages = stored.key_pages, stored.value_pages
        self.key_scale, self.value_scale = stored.key_scale, stored.value_scale
        self._refuse_unsupported()

    def append(self, key: Tensor, value: Tensor, tokens: StepTokens) -> None:
        key, value = (x if x.stride(1) == x.shape[2] else x.contiguous() for x in (key, value))
        append_kv(
            key,
            value,
            tokens.slots,
            self.key_pages,
            self.value_pages,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def attend(
        self,
        query: Tensor,
        tokens: StepTokens,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        if not isinstance(tokens, DeviceDecodeTokens | PackedTokens):
            raise TypeError("pages on a GPU take DeviceDecodeTokens and PackedTokens")
        decode = tokens.decode if isinstance(tokens, PackedTokens) else tokens
        query, rows = query.contiguous(), len(decode.lengths)
        output = torch.empty_like(query)
        # Of rows that do not decode it makes zeros, and what else they are comes after it.
        decode_attention(
            query[:rows],
            self.key_pages,
            self.value_pages,
            decode.block_table,
            decode.lengths,
            _workspace(decode, query.shape[1], query.shape[2]),
            out=output[:rows],
            **self._options(options, sinks),
        )
        if isinstance(tokens, PackedTokens):
            self._prefill(query, tokens, output, self._options(options, sinks))
        return output

    def _prefill(self, query: Tensor, tokens: PackedTokens, output: Tensor, options: dict[str, Any]) -> None:
        key_pages, value_pages, block_table = self.key_pages, self.value_pages, tokens.decode.block_table
        if tokens.contexts is not None and key_pages.element_size() == 1:
            pages, block_table = tokens.contexts.on(query.device)
            key_pages, value_pages = widen_pages(key_pages, pages), widen_pages(value_pages, pages)
            for name in ("key_scale", "value_scale"):
                if options[name].ndim == 3:  # of each token, not of each head
                    options[name] = options[name].index_select(0, pages)
        prefill_attention(query, key_pages, value_pages, block_table, tokens.tiles, out=output, **options)

    def _refuse_unsupported(self) -> None:
        page, device = self.key_pages.shape[2], self.key_pages.device
        if page < SMALLEST_PAGE or page & (page - 1):
            raise UserError(
                f"pages of {page} tokens are not served on a GPU; give a power of two from {SMALLEST_PAGE} on"
            )
        e4m3 = self.key_pages.dtype == torch.float8_e4m3fn
        if e4m3 and device.type == "cuda" and compute_capability(device) < E4M3_FROM:
            raise UserError(
                f"fp8 keys and values need a GPU of compute capability {E4M3_FROM[0]}.{E4M3_FROM[1]} or "
                f"more, and {torch.cuda.get_device_name(device)} has less; use int8_per_token_head"
            )

    def _options(self, options: AttentionOptions, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "scale": options.scale,
            "window": options.sliding_window or 0,
            "softcap": options.softcap or 0.0,
            "sinks": sinks,
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
        }


def _workspace(tokens: DeviceDecodeTokens, heads: int, head_dim: int) -> DecodeWorkspace:
    """Made by the first layer of this shape, in the warm-up run before anything is captured."""
    key = (heads, head_dim)
    if key not in tokens.workspaces:
        largest = tokens.block_table.untyped_storage().nbytes() // (4 * tokens.block_table.stride(0))
        tokens.workspaces[key] = DecodeWorkspace.allocate(
            largest, heads, head_dim, tokens.max_context, tokens.slots.device
        )
    return tokens.workspaces[key]
