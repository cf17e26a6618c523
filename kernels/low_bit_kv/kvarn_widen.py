"""KVarN pages back in 16 bits, for a step that reads each of them many times; Triton.

A step with many tokens of prompts would decode a page for every tile of queries. Here each page is decoded
once, into a run of plain ones that `prefill_attention.py` takes as they are.

    spans    int32 [n, 6]   one plain page each: stored page or -1, row of `held`, first position in the
                            context; the chunk's first position, where it ends, its first token in the step
    turned   fp16 [T, H_kv, D]   the step's keys or values, rotated (`turn.py`)

A stored page is decoded. A page that is not stored is what its request holds before the chunk, then what the
chunk brings, then zeros. Bytes a page: 4 * H_kv * G * D written.
"""

import torch
from torch import Tensor

from ..triton_imports import tl, triton
from .kvarn import KVarNTile
from .turn import held_at


@triton.jit
def _as_they_are(
    span, turned_ptr, held_ptr, out_ptr, token, head, SIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Tokens [N] of a page that is not stored."""
    channel = tl.arange(0, DIM)[None, :]
    row = tl.load(span + 1).to(tl.int64)
    position = tl.load(span + 2) + token
    start = tl.load(span + 3)
    is_new = (position >= start) & (position < tl.load(span + 4))
    older = held_at(row, position, SIDE, head, KV_HEADS, DIM, GROUP_SIZE)[:, None] + channel
    new = ((tl.load(span + 5) + position - start).to(tl.int64) * KV_HEADS + head)[:, None] * DIM + channel
    x = tl.load(held_ptr + older, mask=(position < start)[:, None] & (channel >= 0), other=0.0)
    x += tl.load(turned_ptr + new, mask=is_new[:, None] & (channel >= 0), other=0.0)
    tl.store(out_ptr + token[:, None] * DIM + channel, x)


@triton.jit
def _decoded_keys(
    tile, words_ptr, channels_ptr, tokens_ptr, out_ptr, token, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr
):
    """Tokens [N] of stored keys."""
    WIDTH: tl.constexpr = DIM // 4
    word = tl.arange(0, WIDTH)
    by_token = tl.load(tokens_ptr + tile * 3 * GROUP_SIZE + token).to(tl.float32)[:, None]
    words = tl.load(words_ptr + (tile * GROUP_SIZE + token)[:, None] * WIDTH + word[None, :]).to(tl.int32)
    for part in tl.static_range(4):
        channel = channels_ptr + tile * 3 * DIM + part * WIDTH + word
        scale = tl.load(channel).to(tl.float32)[None, :]
        zero = tl.load(channel + DIM).to(tl.float32)[None, :]
        code = ((words >> (part * 4)) & 15).to(tl.float32)
        at = token[:, None] * DIM + part * WIDTH + word[None, :]
        tl.store(out_ptr + at, ((code * scale + zero) * by_token).to(tl.float16))


@triton.jit
def _decoded_values(
    tile, words_ptr, channels_ptr, tokens_ptr, out_ptr, token,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Tokens [N] of stored values."""
    WIDTH: tl.constexpr = DIM // 4
    ROWS: tl.constexpr = GROUP_SIZE * BITS // 4
    word = tl.arange(0, WIDTH)
    by_token = tokens_ptr + tile * 3 * GROUP_SIZE + GROUP_SIZE + token
    scale = tl.load(by_token).to(tl.float32)[:, None]
    zero = tl.load(by_token + GROUP_SIZE).to(tl.float32)[:, None]
    words = tl.load(words_ptr + (tile * ROWS + token % ROWS)[:, None] * WIDTH + word[None, :])
    words = words.to(tl.int32) >> (token // ROWS * 4 * BITS)[:, None]
    for part in tl.static_range(4):
        channel = channels_ptr + tile * 3 * DIM + 2 * DIM + part * WIDTH + word
        by_channel = tl.load(channel).to(tl.float32)[None, :]
        code = ((words >> (part * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        at = token[:, None] * DIM + part * WIDTH + word[None, :]
        tl.store(out_ptr + at, ((code * scale + zero) * by_channel).to(tl.float16))


@triton.jit
def _widen(
    spans_ptr, turned_k_ptr, turned_v_ptr, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, held_ptr,
    keys_ptr, values_ptr,
    KV_HEADS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head of one plain page."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    span = spans_ptr + index * 6
    page = tl.load(span)
    out = (index.to(tl.int64) * KV_HEADS + head) * GROUP_SIZE * DIM
    if page < 0:
        _as_they_are(span, turned_k_ptr, held_ptr, keys_ptr + out, token, head, 0, KV_HEADS, GROUP_SIZE, DIM)
        _as_they_are(
            span, turned_v_ptr, held_ptr, values_ptr + out, token, head, 1, KV_HEADS, GROUP_SIZE, DIM
        )
    else:
        tile = page.to(tl.int64) * KV_HEADS + head
        _decoded_keys(tile, words_k_ptr, channels_ptr, tokens_ptr, keys_ptr + out, token, GROUP_SIZE, DIM)
        _decoded_values(
            tile, words_v_ptr, channels_ptr, tokens_ptr, values_ptr + out, token, VALUE_BITS, GROUP_SIZE, DIM
        )


def widen_kvarn(
    spans: Tensor, turned_k: Tensor, turned_v: Tensor, pages: KVarNTile, held: Tensor, value_bits: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of the plain pages, fp16 [n, H_kv, G, D]."""
    kv_heads, group_size, dim = held.shape[3:]
    tokens = min(group_size, 32)
    keys, values = (
        torch.empty((len(spans), kv_heads, group_size, dim), dtype=torch.float16, device=held.device)
        for _ in range(2)
    )
    _widen[(len(spans), kv_heads, group_size // tokens)](
        spans, turned_k, turned_v, *vars(pages).values(), held, keys, values,
        KV_HEADS=kv_heads, VALUE_BITS=value_bits, GROUP_SIZE=group_size, DIM=dim, TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return keys, values
