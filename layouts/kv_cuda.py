"""KV pages on a GPU: Triton for decoding and storing, torch's flash attention for prefill.

Not for the CPU, whose pages and products are in `kv_format.py`.

Pages lie as [P, H_kv, page, D], so that one head's tokens are consecutive and a page of 64 tokens of 128
channels is one run of 16 KB in bf16.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ..kernels.append_kv import append_kv
from ..kernels.decode_attention import DecodeWorkspace, decode_attention
from ..kernels.paged_attention import AttentionOptions
from .errors import UserError
from .kv_format import (
    DecodeTokens,
    DeviceDecodeTokens,
    PackedPieces,
    PrefillTokens,
    PromptPiece,
    StepTokens,
    StoredPages,
)


class CudaLayerKV:
    """One layer's pages, [P, H_kv, page, D] as the kernels take them."""

    def __init__(self, stored: StoredPages):
        self.key_pages, self.value_pages = stored.key_pages, stored.value_pages
        self.key_scale, self.value_scale = stored.key_scale, stored.value_scale

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
        if isinstance(tokens, PrefillTokens):
            return self._prefill(query, tokens, options, sinks)
        if isinstance(tokens, DecodeTokens):
            raise TypeError("decode steps on a GPU take DeviceDecodeTokens")
        return decode_attention(
            query.contiguous(),
            self.key_pages,
            self.value_pages,
            tokens.block_table,
            tokens.lengths,
            _workspace(tokens, query.shape[1], query.shape[2]),
            scale=options.scale,
            window=options.sliding_window or 0,
            softcap=options.softcap or 0.0,
            sinks=sinks,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def _prefill(
        self, query: Tensor, tokens: PrefillTokens, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """Each prompt's piece over its own history, gathered from its pages."""
        if self.key_scale is not None:
            raise UserError("prompts are not attended to over eight-bit keys and values on a GPU yet")
        if options.softcap is None and sinks is None and _flash_takes(query, self.value_pages):
            return self._flash(query, tokens.packed(query.device), options)
        output, first = torch.empty_like(query[..., : self.value_pages.shape[3]]), 0
        for piece in tokens.pieces:
            rows = slice(first, first + piece.count)
            output[rows] = self._prefill_piece(query[rows], piece, options, sinks)
            first += piece.count
        return output

    def _flash(self, query: Tensor, pieces: PackedPieces, options: AttentionOptions) -> Tensor:
        """All pieces in one call of torch's flash attention; causal from the last token of each."""
        key, value = (
            stored[pieces.context_pages, :, pieces.context_offsets]
            for stored in (self.key_pages, self.value_pages)
        )
        return torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            pieces.query_starts,
            pieces.context_starts,
            pieces.longest_query,
            pieces.longest_context,
            0.0,
            True,
            False,
            scale=options.scale,
            window_size_left=None if options.sliding_window is None else options.sliding_window - 1,
            window_size_right=None if options.sliding_window is None else 0,
        )[0]

    def _prefill_piece(
        self, query: Tensor, piece: PromptPiece, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """query [n, H, D] of tokens start .. start + n → [n, H, D_v]."""
        end = piece.start + piece.count
        pages = torch.from_numpy(piece.pages).to(query.device, non_blocking=True)
        key, value = (
            stored.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :end]
            for stored in (self.key_pages, self.value_pages)
        )
        queries = query.transpose(0, 1)
        window = options.sliding_window
        if options.softcap is None and sinks is None and (window is None or end <= window):
            output = functional.scaled_dot_product_attention(
                queries[None],
                key[None],
                value[None],
                attn_mask=causal_lower_right(piece.count, end) if piece.start else None,
                is_causal=piece.start == 0,
                scale=options.scale,
                enable_gqa=True,
            )[0]
            return output.transpose(0, 1)
        return _masked(queries, key, value, piece.start, options, sinks).transpose(0, 1)


def _flash_takes(query: Tensor, value_pages: Tensor) -> bool:
    head_dim = query.shape[2]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and head_dim == value_pages.shape[3]
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def _workspace(tokens: DeviceDecodeTokens, heads: int, head_dim: int) -> DecodeWorkspace:
    """Made by the first layer of this shape, in the warm-up run before anything is captured."""
    key = (heads, head_dim)
    if key not in tokens.workspaces:
        largest = tokens.block_table.untyped_storage().nbytes() // (4 * tokens.block_table.stride(0))
        tokens.workspaces[key] = DecodeWorkspace.allocate(
            largest, heads, head_dim, tokens.max_context, tokens.slots.device
        )
    return tokens.workspaces[key]


def _masked(
    query: Tensor, key: Tensor, value: Tensor, start: int, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """What flash attention does not do: windows, soft-capped scores, sinks. All are [heads, tokens, D]."""
    positions = torch.arange(start, start + query.shape[1], device=query.device)[:, None]
    keys = torch.arange(key.shape[1], device=query.device)[None]
    visible = keys <= positions
    if options.sliding_window is not None:
        visible &= keys > positions - options.sliding_window
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = (query @ key.transpose(1, 2)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value
