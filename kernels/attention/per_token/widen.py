"""Pages of int4 or NVFP4 tokens converted back to 16 bits, for a step that reads each of them many times;
Triton.

Prefill attention reads a context once for every few tokens of a prompt, so codes are decoded here once.
NVFP4's codes are decoded without the head's scale, so they are exact in 16 bits.

    pages   int64 [n]   which pages

A page takes 2 * H_kv * page * D bytes written.
"""

import torch
from torch import Tensor

from ...triton_imports import tl, triton
from .block import e2m1, first_channels
from .store import TokenPages

TOKENS = 32
"""A program takes of one head, at most."""


@triton.jit
def _widen(
    words_ptr, scales_ptr, pages_ptr, out_ptr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = DIM // 4
    STEP: tl.constexpr = DIM // 16 if NVFP4 else WIDTH
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    word = tl.arange(0, WIDTH)
    channel = first_channels(DIM, NVFP4)
    slot = (tl.load(pages_ptr + index) * KV_HEADS + head) * PAGE + token
    words = tl.load(words_ptr + slot[:, None] * WIDTH + word[None, :]).to(tl.int32)
    out_ptr += ((index * KV_HEADS + head) * PAGE + token)[:, None] * DIM + channel[None, :]
    for part in tl.static_range(4):
        if NVFP4:
            scale = tl.load(
                scales_ptr + slot[:, None] * (DIM // 16) + ((channel + part * STEP) // 16)[None, :]
            )
            # E2M1's bits in fp16's places are 2^-14 of the value.
            value = e2m1(words, part, False).to(tl.float32) * 16384.0
            value *= scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            scale = tl.load(scales_ptr + slot * 2).to(tl.float32)
            zero = tl.load(scales_ptr + slot * 2 + 1).to(tl.float32)
            value = ((words >> (part * 4)) & 15).to(tl.float32) * scale[:, None] + zero[:, None]
        tl.store(out_ptr + part * STEP, value.to(tl.float16))


def widen_tokens(stored: TokenPages, pages: Tensor) -> Tensor:
    """Return the pages that `pages` names, in its order: fp16 [n, H_kv, page, D]."""
    _, kv_heads, page, width = stored.words.shape
    dim, tokens = 4 * width, min(page, TOKENS)
    wide = torch.empty((len(pages), kv_heads, page, dim), dtype=torch.float16, device=stored.words.device)
    scales = stored.scales.view(torch.uint8) if stored.is_nvfp4 else stored.scales
    _widen[(len(pages), kv_heads, page // tokens)](
        stored.words, scales, pages, wide,
        KV_HEADS=kv_heads, PAGE=page, TOKENS=tokens, DIM=dim, NVFP4=stored.is_nvfp4, num_warps=4,
    )  # fmt: skip
    return wide
