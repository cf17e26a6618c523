"""The bytes of an IQ2_XXS weight as our kernels read them, 2.0625 bits a weight as ever; and back.

A strip is 16 rows of the weight, a chunk 128 columns of it: 4 blocks j of 32, each of 4 vectors t of 8.
Lane `4 g + t` of a warp has 16 bytes of a strip and a chunk, all it needs of rows g and g+8, without a
value changing lanes:

    words [strip, chunk, lane, 4] int32:  indices of row g, signs of row g, indices of row g+8, signs of row
    g+8

    indices   byte j: the codebook index of vector t of block j
    signs     bit     0..3    4..7   8..11  12..15  16..19  20..23  24..27   28..31
              of j    0..3    0..3   0..3   0..3    0..3    0..3    0..3
              weight  0       2      4      6       1       3       5        the scale of block t

Weights 2p and 2p+1 are 16 bits apart, so one shift puts their signs where a pair of bf16 has its own; the
eighth sign is the parity of the seven, and its place holds four bits that a lane can use without asking
another.

    scales [strip, K/256, g] int32: the fp16 scales of rows g (low half) and g+8
"""

import torch
from torch import Tensor

STRIP, CHUNK, SUPER_BLOCK = 16, 128, 256
LANES = 32
LANE_ROWS, VECTORS, BLOCKS = 8, 4, 4
SIGN_SHIFTS = (0, 16, 4, 20, 8, 24, 12)
"""Where the sign of weight i of block 0 lies; block j's lies j bits higher."""


def pack_words(indices: Tensor, patterns: Tensor, block_scales: Tensor) -> Tensor:
    """indices, patterns: [N, K/32, 4] of 0..255 and of seven sign bits; block_scales: [N, K/32], 0..15."""
    device = indices.device
    blocks = torch.arange(BLOCKS, dtype=torch.int32, device=device).view(1, 1, BLOCKS, 1)
    first = _summed(_chunked(indices) << 8 * blocks)
    pattern = _chunked(patterns)
    bits = [((pattern >> i) & 1) << shift for i, shift in enumerate(SIGN_SHIFTS)]
    second = _summed(torch.stack(bits).sum(0, dtype=torch.int32) << blocks)
    second += _padded(block_scales.int()).unflatten(1, (-1, BLOCKS)) << 28
    words = torch.stack((first, second), dim=-1)  # row, chunk, t, which
    words = words.unflatten(0, (-1, 2, LANE_ROWS)).permute(0, 3, 2, 4, 1, 5)
    return words.reshape(words.shape[0], words.shape[1], LANES, 4).contiguous()


def pack_scales(scale: Tensor) -> Tensor:
    """float16 [N, K/256] to int32 [strips, K/256, 8]."""
    pairs = _padded(scale).unflatten(0, (-1, 2, LANE_ROWS)).permute(0, 3, 2, 1)
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def unpack(words: Tensor, scales: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices, patterns, block scales and fp16 scales of the first `n` rows; undoes the two above."""
    strips, chunks = words.shape[:2]
    by_row = words.view(strips, chunks, LANE_ROWS, VECTORS, 2, 2).permute(0, 4, 2, 1, 3, 5)
    first, second = by_row.reshape(-1, chunks, VECTORS, 2)[:n].unbind(-1)
    blocks = torch.arange(BLOCKS, dtype=torch.int32, device=words.device).view(1, 1, BLOCKS, 1)
    indices = (first.unsqueeze(2) >> 8 * blocks) & 0xFF
    moved = second.unsqueeze(2) >> blocks
    patterns = sum(
        (((moved >> shift) & 1) << i for i, shift in enumerate(SIGN_SHIFTS)), start=torch.zeros_like(moved)
    )
    block_scales = (second >> 28) & 0xF
    halves = (
        scales.view(torch.float16)
        .view(strips, -1, LANE_ROWS, 2)
        .permute(0, 3, 2, 1)
        .reshape(strips * STRIP, -1)
    )
    return indices.flatten(1, 2), patterns.flatten(1, 2), block_scales.flatten(1), halves[:n]


def _chunked(values: Tensor) -> Tensor:
    """[N, K/32, 4] to int32 [N', K/128, j, t], N' being N padded to whole strips with zeros."""
    return _padded(values.int()).unflatten(1, (-1, BLOCKS))


def _summed(values: Tensor) -> Tensor:
    """The bits of all blocks j in one word: [N', K/128, j, t] to [N', K/128, t]."""
    return values.sum(2, dtype=torch.int32)


def _padded(values: Tensor) -> Tensor:
    rows = -values.shape[0] % STRIP
    return torch.cat((values, values.new_zeros(rows, *values.shape[1:]))) if rows else values
