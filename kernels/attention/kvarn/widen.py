"""Converts KVarN pages back to 16 bits, for a step that reads each of them many times; Triton.

A large prefill step would decode each page once for every tile of queries. The kernels of this file decode
each page once, into plain pages for `choose_prefill.py`.

    spans         int32 [n, 6]      one plain page each: stored page or -1, row of `held`, first position in
                                    the context; the chunk's first position, where it ends, its first token
                                    in the step
    key, value    [T, H_kv, D]      the step's, as in `held.py`
    keys, values  [n, H_kv, G, D]   of the same dtype

A stored page is decoded and rotated back on the matrix units. The Hadamard matrix of D is the Kronecker
product of those of 4 and of D/4, so each of the four slices of channels is multiplied by the matrix of D/4,
and then the slices are added and subtracted. A page that is not stored yet is put together from the tokens
that its request holds, the chunk's tokens, and zeros. A page's keys and values are 4 * H_kv * G * D bytes.
"""

import torch
from torch import Tensor

from ...hadamard import _matrix
from ...triton_imports import tl, triton
from .held import held_at
from .reference import KVarNTile

CHANNELS = 8192
"""That a program decodes, of some tokens: 64 for each thread."""


@triton.jit
def _as_they_are(
    span, new_ptr, new_stride, held_ptr, out_ptr, token, head, side,
    KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Load the tokens [N] of a page that is still unquantized."""
    channel = tl.arange(0, DIM)[None, :]
    row = tl.load(span + 1).to(tl.int64)
    position = tl.load(span + 2) + token
    start = tl.load(span + 3)
    is_new = (position >= start) & (position < tl.load(span + 4))
    older = held_at(row, position, side, head, KV_HEADS, DIM, GROUP_SIZE)[:, None] + channel
    new = ((tl.load(span + 5) + position - start).to(tl.int64) * new_stride + head * DIM)[:, None] + channel
    x = tl.load(held_ptr + older, mask=(position < start)[:, None] & (channel >= 0), other=0.0)
    x += tl.load(new_ptr + new, mask=is_new[:, None] & (channel >= 0), other=0.0)
    tl.store(out_ptr + token[:, None] * DIM + channel, x)


@triton.jit
def _slices(words, BITS: tl.constexpr):
    """Return codes [4, N, D/4] of words int32 [N, D/4]."""
    shift = (tl.arange(0, 4) * BITS)[:, None, None]
    return ((words[None, :, :] >> shift) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _of_channels(ptr, WIDTH: tl.constexpr):
    """fp32 [4, 1, D/4]."""
    slice = tl.arange(0, 4)[:, None, None] * WIDTH
    return tl.load(ptr + slice + tl.arange(0, WIDTH)[None, None, :]).to(tl.float32)


@triton.jit
def _of_tokens(ptr, token):
    """fp32 [1, N, 1]."""
    return tl.load(ptr + token).to(tl.float32)[None, :, None]


@triton.jit
def _keys(
    tile, words_ptr, channels_ptr, tokens_ptr, token, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Return [4, N, D/4] of a tile's tokens [N]."""
    WIDTH: tl.constexpr = DIM // 4
    at = (tile * GROUP_SIZE + token)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    codes = _slices(tl.load(words_ptr + at).to(tl.int32), 4)
    channels_ptr += tile * 3 * DIM
    scale, zero = _of_channels(channels_ptr, WIDTH), _of_channels(channels_ptr + DIM, WIDTH)
    return (codes * scale + zero) * _of_tokens(tokens_ptr + tile * 3 * GROUP_SIZE, token)


@triton.jit
def _values(
    tile, words_ptr, channels_ptr, tokens_ptr, token,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The same of values."""
    WIDTH: tl.constexpr = DIM // 4
    ROWS: tl.constexpr = GROUP_SIZE * BITS // 4
    at = (tile * ROWS + token % ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    codes = _slices(tl.load(words_ptr + at).to(tl.int32) >> (token // ROWS * 4 * BITS)[:, None], BITS)
    tokens_ptr += tile * 3 * GROUP_SIZE + GROUP_SIZE
    scale, zero = _of_tokens(tokens_ptr, token), _of_tokens(tokens_ptr + GROUP_SIZE, token)
    return (codes * scale + zero) * _of_channels(channels_ptr + tile * 3 * DIM + 2 * DIM, WIDTH)


@triton.jit
def _rotated(x, matrix_ptr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply x [4, N, D/4] by the Hadamard matrix; the result is fp32 [4, N * D/4]."""
    line = tl.arange(0, WIDTH)
    matrix = tl.load(matrix_ptr + line[:, None] * WIDTH + line[None, :])
    y = tl.dot(tl.reshape(x.to(tl.float16), [4 * TOKENS, WIDTH]), matrix)
    y = tl.reshape(y, [4, TOKENS * WIDTH]) * (0.25 / WIDTH) ** 0.5
    # A butterfly for each bit of a slice's number, which goes from top to bottom.
    for _ in tl.static_range(2):
        low, high = tl.split(tl.permute(tl.reshape(y, [2, 2, TOKENS * WIDTH]), [1, 2, 0]))
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [4, TOKENS * WIDTH])
    return y


# Strides are a model's own: known to be divided by 16, they let a load take eight channels.
@triton.jit
def _widen(
    spans_ptr, key_ptr, value_ptr, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, held_ptr, matrix_ptr,
    keys_ptr, values_ptr, key_stride, value_stride,
    KV_HEADS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write keys or values of one head for TOKENS tokens of one plain page."""
    WIDTH: tl.constexpr = DIM // 4
    index = tl.program_id(0)
    head = tl.program_id(1) % KV_HEADS
    side = tl.program_id(1) // KV_HEADS
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    span = spans_ptr + index * 6
    page = tl.load(span)
    out_ptr = keys_ptr if side == 0 else values_ptr
    out_ptr += (index.to(tl.int64) * KV_HEADS + head) * GROUP_SIZE * DIM
    if page < 0:
        new_ptr = key_ptr if side == 0 else value_ptr
        new_stride = key_stride if side == 0 else value_stride
        _as_they_are(
            span, new_ptr, new_stride, held_ptr, out_ptr, token, head, side, KV_HEADS, GROUP_SIZE, DIM
        )
        return
    tile = page.to(tl.int64) * KV_HEADS + head
    if side == 0:
        x = _keys(tile, words_k_ptr, channels_ptr, tokens_ptr, token, GROUP_SIZE, DIM)
    else:
        x = _values(tile, words_v_ptr, channels_ptr, tokens_ptr, token, VALUE_BITS, GROUP_SIZE, DIM)
    x = tl.reshape(_rotated(x, matrix_ptr, TOKENS, WIDTH), [4, TOKENS, WIDTH])
    at = token[None, :, None] * DIM + (tl.arange(0, 4) * WIDTH)[:, None, None]
    at += tl.arange(0, WIDTH)[None, None, :]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty))


def widen_kvarn(
    spans: Tensor, key: Tensor, value: Tensor, pages: KVarNTile, held: Tensor, value_bits: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values of the plain pages; arguments are as in the file's docstring."""
    kv_heads, group_size, dim = held.shape[3:]
    tokens = min(group_size, CHANNELS // dim)
    keys, values = (
        torch.empty((len(spans), kv_heads, group_size, dim), dtype=key.dtype, device=held.device)
        for _ in range(2)
    )
    _widen[(len(spans), 2 * kv_heads, group_size // tokens)](
        spans, key, value, *vars(pages).values(), held, _matrix(dim // 4, held.device, torch.float16),
        keys, values, key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, VALUE_BITS=value_bits, GROUP_SIZE=group_size, DIM=dim, TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return keys, values
