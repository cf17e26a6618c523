"""Widens 8-bit KV pages (e4m3, int8) to fp16, for a kernel that reads each page many times; Triton.

Prefill attention reads a context once for every 16 to 32 tokens of a prompt, and its products take 16-bit
operands, so pages are converted here once. fp16 holds every e4m3 and int8 value, so nothing is rounded;
scales stay as they are.

    pages        int64 [n]              which pages
    stored       [P, H_kv, page, D]     float8_e4m3fn or int8, keys or values, of any D

A page takes 3 * H_kv * page * D bytes. `hopper_prefill.py` reads e4m3 keys directly, without this.
"""

import torch
from torch import Tensor

from ..triton_imports import tl, triton

BLOCK = 8192
"""Values a program takes."""


@triton.jit
def _widen(from_ptr, to_ptr, pages_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    page = tl.load(pages_ptr + index)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(from_ptr + page * SIZE + at, mask=inside)
    tl.store(to_ptr + index * SIZE + at, values.to(tl.float16), mask=inside)


def widen_pages(stored: Tensor, pages: Tensor) -> Tensor:
    """Return the pages that `pages` names, in its order: fp16 [n, H_kv, page, D]."""
    wide = torch.empty((len(pages), *stored.shape[1:]), dtype=torch.float16, device=stored.device)
    size = stored[0].numel()
    _widen[(len(pages), triton.cdiv(size, BLOCK))](stored, wide, pages, SIZE=size, BLOCK=BLOCK, num_warps=8)
    return wide
