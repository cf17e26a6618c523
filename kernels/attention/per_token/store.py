"""Stores new keys and values in pages of int4 or NVFP4 tokens, rotated first if the format asks; Triton.

    query         [T, H, D], key, value [T, H_kv, D]    a token's heads contiguous
    slots         int64 [T]              page * page_size + offset; -1 stores nothing
    words         int16 [P, H_kv, page, D/4]
    scales        int4: fp16 [P, H_kv, page, 2]; NVFP4: float8_e4m3fn [P, H_kv, page, D/16]
    head_scale    NVFP4: fp32 [H_kv]

The references are in `int4.py` and `nvfp4.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...device import compute_capability
from ...e4m3 import CONVERTS_TWICE, rounded_to_odd
from ...hadamard import log2, rotate
from ...triton_imports import constexpr_function, tl, triton
from . import nvfp4

SIGN_SHIFTS, MAGNITUDE_SHIFTS = tl.constexpr(nvfp4.SIGN_SHIFTS), tl.constexpr(nvfp4.MAGNITUDE_SHIFTS)
LARGE = 1024
"""Tokens in a step: from here on a program takes several of them. The bits are the same."""


@dataclass(frozen=True)
class TokenPages:
    """One layer's keys or values, as in the file's docstring; int4 if there is no head_scale."""

    words: Tensor
    scales: Tensor
    head_scale: Tensor | None = None

    @property
    def is_nvfp4(self) -> bool:
        return self.head_scale is not None


@triton.jit
def _round(x):
    """Round half to even, as torch does: adding 1.5 * 2^23 leaves the rounded integer in the low bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _store_int4(x, slot, mask, words_ptr, scales_ptr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Load x fp32 [ROWS, D], only if `mask` [ROWS] is true."""
    zero = tl.min(x, axis=1).to(tl.float16)
    scale = tl.maximum((tl.max(x, axis=1) - tl.min(x, axis=1)) / 15.0, 5.9604645e-08).to(tl.float16)
    codes = _round((x - zero.to(tl.float32)[:, None]) / scale.to(tl.float32)[:, None])
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0)
    _store_words(codes, slot, mask, words_ptr, ROWS, DIM)
    tl.store(scales_ptr + slot * 2, scale, mask=mask)
    tl.store(scales_ptr + slot * 2 + 1, zero, mask=mask)


@triton.jit
def _store_words(codes, slot, mask, words_ptr, ROWS: tl.constexpr, DIM: tl.constexpr):
    shift = tl.arange(0, 4) * 4
    fields = tl.reshape(codes.to(tl.int32), [ROWS, 4, DIM // 4]) << shift[None, :, None]
    where = slot[:, None] * (DIM // 4) + tl.arange(0, DIM // 4)[None, :]
    tl.store(words_ptr + where, tl.sum(fields, axis=1).to(tl.int16), mask=mask[:, None])


@triton.jit
def _rounded(groups, largest, TO: tl.constexpr, TWICE: tl.constexpr):
    """Return E4M3 scales in fp32 that make the largest number of each group of 16 equal to TO; the codes; and
    the squared errors.
    """
    scale = tl.minimum(largest / TO, 448.0)
    if TWICE:
        scale = rounded_to_odd(scale)
    scale = scale.to(tl.float8e4nv).to(tl.float32)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    # Steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6.
    size = tl.minimum(tl.abs(groups * inverse[:, :, None]), 6.0)
    low, middle, high = _round(size * 2), _round(size), _round(size * 0.5)
    code = tl.where(size < 2, low, tl.where(size < 4, middle + 2, high + 4))
    value = tl.where(size < 2, low * 0.5, tl.where(size < 4, middle, high * 2))
    off = tl.abs(groups) - value * scale[:, :, None]
    return scale, code, tl.sum(off * off, axis=2)


@constexpr_function
def _nibbles(top: int, shifts: tuple[int, ...]) -> int:
    """Return where, below bit `top`, shifts bring a word's four codes, which have four bits each."""
    return sum((top - shift) << 4 * field for field, shift in enumerate(shifts))


@triton.jit
def _store_nvfp4(
    x, slot, mask, words_ptr, scales_ptr, head_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    groups = tl.reshape(x / head_scale, [ROWS, DIM // 16, 16])
    largest = tl.max(tl.abs(groups), axis=2)
    scale, code, error = _rounded(groups, largest, 6.0, TWICE)
    other_scale, other_code, other_error = _rounded(groups, largest, 4.0, TWICE)
    other = other_error < error
    scale = tl.where(other, other_scale, scale)
    code = tl.where(other[:, :, None], other_code, code)
    field = tl.arange(0, 4)
    sign_place = _nibbles(15, SIGN_SHIFTS) >> (4 * field) & 15
    magnitude_place = _nibbles(9, MAGNITUDE_SHIFTS) >> (4 * field) & 15
    # A quarter of the head, field and place in words.
    bits = tl.reshape(code.to(tl.int32), [ROWS, 4, 4, DIM // 16]) << magnitude_place[None, None, :, None]
    bits += tl.reshape((groups < 0).to(tl.int32), bits.shape) << sign_place[None, None, :, None]
    n = tl.arange(0, DIM // 4)
    word = n % (DIM // 16) // 4 * 16 + n % 4 // 2 * 8 + n // (DIM // 16) * 2 + n % 2
    words = tl.reshape(tl.sum(bits, axis=2), [ROWS, DIM // 4]).to(tl.int16)
    tl.store(words_ptr + slot[:, None] * (DIM // 4) + word[None, :], words, mask=mask[:, None])
    where = slot[:, None] * (DIM // 16) + tl.arange(0, DIM // 16)[None, :]
    tl.store(scales_ptr + where, scale.to(tl.float8e4nv), mask=mask[:, None])


# Strides are a model's own: known to be divided by 16, they let a load take eight channels.
@triton.jit(do_not_specialize=["count"])
def _store(
    key_ptr, value_ptr, slots_ptr, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr,
    head_scale_k_ptr, head_scale_v_ptr, count, key_stride, value_stride,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    LOG_DIM: tl.constexpr, NVFP4: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of TOKENS tokens, for one kv head.

    NVFP4: 0 for int4; 2 where Triton rounds twice on the way to E4M3, as `kernels/e4m3.py` tells; else 1
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    ROWS: tl.constexpr = 2 * TOKENS
    head = tl.program_id(1)
    line = tl.arange(0, ROWS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + line // 2
    is_value = line % 2 == 1
    slot = tl.load(slots_ptr + token, mask=token < count, other=-1)
    mask = slot >= 0
    at = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
    dim = tl.arange(0, DIM)[None, :]
    of_key = (token * key_stride + head * DIM)[:, None] + dim
    of_value = (token * value_stride + head * DIM)[:, None] + dim
    x = tl.load(key_ptr + of_key, mask=(mask & ~is_value)[:, None] & (dim >= 0), other=0.0).to(tl.float32)
    x += tl.load(value_ptr + of_value, mask=(mask & is_value)[:, None] & (dim >= 0), other=0.0).to(tl.float32)
    if ROTATED:
        x = rotate(x, ROWS, DIM, LOG_DIM)
    if NVFP4:
        key_scale, value_scale = tl.load(head_scale_k_ptr + head), tl.load(head_scale_v_ptr + head)
        _store_nvfp4(x, at, mask & ~is_value, words_k_ptr, scales_k_ptr, key_scale, ROWS, DIM, NVFP4 == 2)
        _store_nvfp4(x, at, mask & is_value, words_v_ptr, scales_v_ptr, value_scale, ROWS, DIM, NVFP4 == 2)
    else:
        _store_int4(x, at, mask & ~is_value, words_k_ptr, scales_k_ptr, ROWS, DIM)
        _store_int4(x, at, mask & is_value, words_v_ptr, scales_v_ptr, ROWS, DIM)


@triton.jit(do_not_specialize=["num_lines"])
def _rotate_lines(
    from_ptr, to_ptr, num_lines, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr
):  # fmt: skip
    """Quantize and store ROWS lines of D channels."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    keep = (line < num_lines)[:, None] & (at >= 0)
    x = tl.load(from_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(to_ptr + at, rotate(x, ROWS, DIM, LOG_DIM).to(to_ptr.dtype.element_ty), mask=keep)


def store_tokens(
    key: Tensor, value: Tensor, slots: Tensor, keys: TokenPages, values: TokenPages, rotated: bool
) -> None:
    """Quantize and store key and value [T, H_kv, D]."""
    count, kv_heads, dim = key.shape
    tokens = 4 if count > LARGE else 1
    capability = compute_capability(key.device)
    pdl = capability >= (9, 0)
    _store[(triton.cdiv(count, tokens), kv_heads)](
        key, value, slots, keys.words, values.words, keys.scales, values.scales,
        keys.head_scale, values.head_scale, count, key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, PAGE=keys.words.shape[2], TOKENS=tokens, DIM=dim, LOG_DIM=log2(dim),
        NVFP4=keys.is_nvfp4 * (2 if capability == CONVERTS_TWICE else 1), ROTATED=rotated, PDL=pdl,
        num_warps=1 if tokens == 1 else 4, launch_pdl=pdl,
    )  # fmt: skip


def rotate_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate x [T, H, D], contiguous, into `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    lines, dim = x.shape[0] * x.shape[1], x.shape[2]
    _rotate_lines[(triton.cdiv(lines, 8),)](
        x, out, lines, ROWS=8, DIM=dim, LOG_DIM=log2(dim), num_warps=4
    )  # fmt: skip
    return out
