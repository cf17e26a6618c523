"""Appends new keys and values to the paged KV cache, quantized on the way; Triton, and its torch reference.

The kernel writes all KV dtypes that `decode.py` reads: 16 bits unchanged, e4m3 with a given scale per head,
int8 with a scale for each token and head.

    key, value    [T, H_kv, D]          bf16 or fp16; T tokens of any requests
    slots         int64 [T]             page * page_size + offset; -1 stores nothing (padding of a batch)
    key_pages     [P, H_kv, page, D]    written; value_pages alike
    key_scale     None; fp32 [H_kv] for e4m3, read; fp32 [P, H_kv, page] for int8, written

For each token and head, 2 * D * 2 bytes are read and 2 * D * itemsize are written. A layer takes one launch.
"""

import torch
from torch import Tensor

from ..device import compute_capability
from ..e4m3 import CONVERTS_TWICE, rounded_to_odd
from ..triton_imports import tl, triton

E4M3_MAX = 448.0
INT8_MAX = 127.0
LARGE = 1024
"""Tokens in a step: from here on a program takes several of them. The bits are the same."""


def quantize_reference(new: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `new` [..., H_kv, D] as pages of `dtype` hold it; for int8 also its scales [..., H_kv].

    scale: fp32 [H_kv] for e4m3; other dtypes ignore it
    """
    values = new.float()
    if dtype == torch.int8:
        token_scale = values.abs().amax(dim=-1).clamp(min=1e-10) / INT8_MAX
        return (values / token_scale.unsqueeze(-1)).round().to(dtype), token_scale
    if dtype == torch.float8_e4m3fn and scale is not None:
        return (values / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(dtype), None
    return new.to(dtype), None


def append_kv_reference(
    new: Tensor, pages: Tensor, slots: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Store `new`, keys or values, in a copy of `pages`; return the copy (and a copy of int8's `scale`)."""
    pages = pages.clone()
    scale = scale.clone() if scale is not None else None
    stored, token_scale = quantize_reference(new, pages.dtype, scale)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, pages.shape[2])
        pages[page, :, offset] = stored[token]
        if token_scale is not None and scale is not None:
            scale[page, :, offset] = token_scale[token]
    return pages, scale


@triton.jit
def _quantize(x, scale_ptr, head, at, stored, SCALES: tl.constexpr, TWICE: tl.constexpr):
    """Convert x fp32 [T, D] to the pages' dtype; for int8 also store the scales."""
    if SCALES == 1:
        x = x / tl.load(scale_ptr + head)
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        if TWICE:
            x = rounded_to_odd(x)
    if SCALES == 2:
        scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10) / 127.0
        tl.store(scale_ptr + at, scale, mask=stored)
        x = x / scale[:, None]
        # Round half to even, as torch does: adding 1.5 * 2^23 leaves the rounded integer in the low bits.
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit(do_not_specialize=["count", "key_stride", "value_stride"])
def _append(
    key_ptr, value_ptr, slots_ptr, key_pages_ptr, value_pages_ptr, key_scale_ptr, value_scale_ptr,
    count, key_stride, value_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SCALES: tl.constexpr, TOKENS: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store keys and values of TOKENS tokens, for one kv head."""
    if PDL:
        # Launched while the kernel ahead still runs, and before anything is read.
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token, mask=token < count, other=-1)
    stored = slot >= 0
    dim = tl.arange(0, DIM)
    keep = stored[:, None] & (dim < HEAD_DIM)[None, :]
    at = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
    source = (head * HEAD_DIM + dim)[None, :]
    key = tl.load(key_ptr + token[:, None] * key_stride + source, mask=keep, other=0.0)
    value = tl.load(value_ptr + token[:, None] * value_stride + source, mask=keep, other=0.0)
    key = _quantize(key.to(tl.float32), key_scale_ptr, head, at, stored, SCALES, TWICE)
    value = _quantize(value.to(tl.float32), value_scale_ptr, head, at, stored, SCALES, TWICE)
    to = at[:, None] * HEAD_DIM + dim[None, :]
    tl.store(key_pages_ptr + to, key.to(key_pages_ptr.dtype.element_ty), mask=keep)
    tl.store(value_pages_ptr + to, value.to(value_pages_ptr.dtype.element_ty), mask=keep)


def append_kv(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Store `key` and `value` [T, H_kv, D] in place; a token's heads must be contiguous."""
    count, kv_heads, head_dim = key.shape
    tokens = 16 if count > LARGE else 1
    capability = compute_capability(key.device)
    pdl = capability >= (9, 0)
    _append[(triton.cdiv(count, tokens), kv_heads)](
        key, value, slots, key_pages, value_pages, key_scale, value_scale,
        count, key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), PAGE=key_pages.shape[2],
        SCALES=0 if key_scale is None else (2 if key_scale.ndim == 3 else 1),
        TOKENS=tokens, TWICE=capability == CONVERTS_TWICE, PDL=pdl,
        num_warps=4 if tokens > 1 else 1, launch_pdl=pdl,
    )  # fmt: skip
