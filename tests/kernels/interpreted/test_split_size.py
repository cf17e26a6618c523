"""How decode attention cuts a context into splits: by that context alone; see conftest.py."""

import pytest
import torch
import triton
import triton.language as tl
from scalegate.kernels.attention.decode import _split_tokens, decode_split_tokens

from .test_decode_attention import DEVICE


def split_size(length: int, max_context: int, tile: int) -> int:
    """Short contexts are cut finer: by one tile up to four tiles, and by two up to eight."""
    if length <= 8 * tile:
        return tile if length <= 4 * tile else 2 * tile
    return decode_split_tokens(max_context)


@triton.jit
def _split_tokens_of(lengths_ptr, out_ptr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, _split_tokens(tl.load(lengths_ptr + row), SPLIT, BLOCK))


@pytest.mark.parametrize(("max_context", "tile"), [(4096, 64), (40960, 32)])
def test_the_kernel_cuts_a_context_as_the_function_says(max_context: int, tile: int):
    lengths = [1, tile, 4 * tile, 4 * tile + 1, 8 * tile, 8 * tile + 1, max_context]
    out = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
    there = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    _split_tokens_of[(len(lengths),)](there, out, SPLIT=decode_split_tokens(max_context), BLOCK=tile)
    assert out.tolist() == [split_size(length, max_context, tile) for length in lengths]
    assert all(-(-n // split_size(n, max_context, tile)) <= 64 for n in lengths)
