"""Our int4 pages in the memory that vLLM allocates for `int4_per_token_head`, and attention over them.

    memory  uint8 [2, P, H_kv, page, D/2 + 4]   keys, then values: as many bytes as vLLM counts for its pages
    words   int16 [P, H_kv, page, D/4]          the first bytes of each half
    scales  fp16 [P, H_kv, page, 2]             the last bytes of each half

vLLM's own format also takes D/2 + 4 bytes for a token and head. It stores codes of neighbouring channels in
one byte, and a scale in fp32 with the zero point in its lowest bits. Ours stores codes of channels D/4 apart
in one word, and scale and zero in fp16 (`kernels/attention/per_token/int4.py`). The bytes of the two formats
are different; only the backend that wrote a page can read it.

A page of our format is not one range of bytes, so whatever moves a page's bytes cannot be used.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention.choose_prefill import attend_prefill
from ..kernels.attention.coded.rotate_back import rotate_back
from ..kernels.attention.decode import DecodeWorkspace
from ..kernels.attention.options import AttentionOptions
from ..kernels.attention.per_token.decode import token_decode
from ..kernels.attention.per_token.prefill import token_prefill
from ..kernels.attention.per_token.store import TokenPages, rotate_heads, store_tokens
from ..kernels.attention.per_token.widen import widen_tokens
from ..kernels.attention.prefill import LARGE, TILE, tiles_of

SCALE_BYTES = 4
"""Of a token's scale and zero."""
WIDEN_FROM = TILE
"""Tokens of prompts in a step: from here on each page is decoded once for all of them."""
MOST_WIDENED = 1 << 29
"""Bytes of the pages that one step decodes, at most. A step that reads more multiplies codes as they are."""


def memory_shape(num_pages: int, page: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    return 2, num_pages, kv_heads, page, dim // 2 + SCALE_BYTES


def pages_in(memory: Tensor) -> tuple[TokenPages, TokenPages]:
    """Return views of the keys and of the values in a layer's memory, which has `memory_shape`."""
    _, num_pages, kv_heads, page, row = memory.shape
    tokens, words = (num_pages, kv_heads, page), (row - SCALE_BYTES) // 2
    first_scale = num_pages * kv_heads * page * 2 * words
    keys, values = (
        TokenPages(
            half[:first_scale].view(torch.int16).view(*tokens, words),
            half[first_scale:].view(torch.float16).view(*tokens, 2),
        )
        for half in memory.view(2, -1)
    )
    return keys, values


@dataclass(frozen=True)
class Prompts:
    """The prompts of a step: chunks of one or more tokens.

    tiles: int32 [N, 4], as in `kernels/attention/prefill.py`
    pages: int64 [n], the pages of their contexts; None if the step decodes no pages
    table: int32 [R, W], a block table of indices into `pages`
    """

    tiles: Tensor
    pages: Tensor | None
    table: Tensor


@dataclass(frozen=True)
class Step:
    """A step's tokens: `num_decodes` requests with one token each, then prompts, then padding.

    num_tokens:  without padding
    block_table: int32 [R, W]
    lengths:     int32 [R], each context with this step's tokens; 0 for requests of padding
    """

    num_tokens: int
    num_decodes: int
    block_table: Tensor
    lengths: Tensor
    prompts: Prompts | None


def prompts_of(
    num_decodes: int, starts: np.ndarray, lengths: np.ndarray, block_table: Tensor, page: int, most_pages: int
) -> Prompts:
    """Describe the prompts of a step on the device.

    starts, lengths: int [R + 1] and [R], each request's first token in the step and its context's length
    most_pages: the number of pages that the step may decode
    """
    device, counts = block_table.device, np.diff(starts)
    rows = [row for row in range(num_decodes, len(counts)) if counts[row] > 0]
    chunks = [(int(counts[row]), int(lengths[row] - counts[row]), row) for row in rows]
    tiles = to_device(tiles_of(int(starts[num_decodes]), chunks, 0), device)
    num_pages = [-(-int(lengths[row]) // page) for row in rows]
    if counts[num_decodes:].sum() < WIDEN_FROM or sum(num_pages) > most_pages:
        return Prompts(tiles, None, block_table)
    table = np.zeros((len(counts), max(num_pages)), np.int32)
    for row, count, end in zip(rows, num_pages, np.cumsum(num_pages), strict=True):
        table[row, :count] = np.arange(end - count, end)
    places = [
        row * block_table.shape[1] + np.arange(count) for row, count in zip(rows, num_pages, strict=True)
    ]
    pages = torch.take(block_table, to_device(np.concatenate(places), device))
    return Prompts(tiles, pages.long(), to_device(table, device))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy through pinned memory, so that the host need not wait for the steps in flight."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def store(key: Tensor, value: Tensor, slots: Tensor, memory: tuple[TokenPages, TokenPages]) -> None:
    """Store key and value [T, H_kv, D]; slots as in `store.py`. Tokens without a slot are padding."""
    count = len(slots)
    store_tokens(by_token(key[:count]), by_token(value[:count]), slots, *memory, rotated=True)


def by_token(x: Tensor) -> Tensor:
    """Return x [T, H, D] with each token's heads contiguous."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


def attend(
    query: Tensor,
    memory: tuple[TokenPages, TokenPages],
    step: Step,
    workspace: DecodeWorkspace,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write the step's tokens of `out` [T, H, D] for query [T, H, D]."""
    query, out = query[: step.num_tokens].contiguous(), out[: step.num_tokens]
    rotated, decodes = rotate_heads(query, torch.float16), step.num_decodes
    if decodes:
        token_decode(
            rotated[:decodes],
            *memory,
            step.block_table,
            step.lengths[:decodes],
            workspace,
            rotated=True,
            options=options,
            out=out[:decodes],
        )
    if step.prompts is None:
        return
    prompts, result = step.prompts, torch.empty_like(rotated)
    if prompts.pages is None:
        token_prefill(rotated, *memory, step.block_table, prompts.tiles, options, result)
    else:
        keys, values = (widen_tokens(side, prompts.pages) for side in memory)
        attend_prefill(rotated, keys, values, prompts.table, prompts.tiles, options, result, one_form=False)
    rotate_back(result, step.lengths[:decodes], out, decodes)


def warm_up(
    kv_heads: int, page: int, workspace: DecodeWorkspace, options: AttentionOptions, dtype: torch.dtype
) -> None:
    """Compile every kernel that any step may use, with pages of its own: a step of one decoding request, and
    prompts that multiply codes, decode few pages, and decode many.
    """
    _, heads, _, dim = workspace.partial.shape
    device = workspace.partial.device
    longest = max(WIDEN_FROM, LARGE + 1)
    count = -(-longest // page)
    pages = pages_in(torch.zeros(memory_shape(count, page, kv_heads, dim), dtype=torch.uint8, device=device))
    table = torch.arange(count, dtype=torch.int32, device=device).unsqueeze(0)
    for tokens in (1, 2, WIDEN_FROM, longest):
        query, out = (torch.zeros(tokens, heads, dim, dtype=dtype, device=device) for _ in range(2))
        new = torch.zeros(tokens, kv_heads, dim, dtype=dtype, device=device)
        store(new, new, torch.arange(tokens, device=device), pages)
        starts, lengths = np.array([0, tokens]), np.array([tokens])
        prompts = None if tokens == 1 else prompts_of(0, starts, lengths, table, page, count)
        on_device = torch.tensor([tokens], dtype=torch.int32, device=device)
        step = Step(tokens, int(tokens == 1), table, on_device, prompts)
        attend(query, pages, step, workspace, options, out)
