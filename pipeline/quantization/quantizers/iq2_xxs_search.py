"""Our IQ2_XXS solver: each vector's nearest codebook entry and each block's scale, by weighted squared error.

The error of weight i counts `importance[i]` times. For a vector of magnitudes x and a scale s, entry g costs
`s² Σ w g² - 2 s Σ w g x`: two products with the codebook give those sums for all 256 entries at once, and
every scale after that takes one addition and one minimum. Signs are those of the weights; the format allows
only an even number of minus signs, so if it is odd, the sign whose change costs least is changed.

Scales of blocks are searched over ratios of the largest magnitude. After that search, the super-block's fp16
scale and the blocks' four bits are fitted to the scales that were found, and the codebook entries are chosen
again for the resulting scales. Both steps run twice. It reads no file.
"""

import torch
from torch import Tensor

from ....kernels.iq2_xxs.grid import LENGTH, MAGNITUDES, grid
from ....layouts.formats.iq2_xxs import (
    BLOCK,
    BLOCK_SCALE_BITS,
    IQ2XXS,
    SIGN_BITS,
    SUPER_BLOCK,
    VECTORS,
    IQ2XXSWeight,
    pack_iq2_xxs,
)
from ..solvers.column_sums import solve_rows, total
from .quantizer import QuantizedWeight

BLOCKS = SUPER_BLOCK // BLOCK
FLAT = tuple(MAGNITUDES[-1] / magnitude for magnitude in MAGNITUDES[:-1])
RATIOS = tuple(0.44 + 0.04 * i for i in range(17)) + FLAT
"""Candidate scales: the value of the codebook's largest magnitude as a share of a block's largest weight."""
SUPER_RATIOS = tuple(0.7 + 0.02 * i for i in range(26))
"""Candidate super-block scales, relative to the scale at which the largest block scale has the highest
code."""
FITS = 2
MAX_CODE = 2**BLOCK_SCALE_BITS - 1
CHUNKS = 1 << 15, 1 << 22
"""How many weights are solved at once, on the CPU and on a GPU: each takes three times 128 bytes."""


def quantize_iq2_xxs(weight: Tensor, spec: IQ2XXS, importance: Tensor | None = None) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device.

    importance: fp32 [K], positive, such as the mean square of each input; None counts all columns alike
    """
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    device = weight.device
    words = torch.empty(n, k // 16, dtype=torch.int32, device=device)
    scale = torch.empty(n, k // SUPER_BLOCK, dtype=torch.float16, device=device)
    importance = torch.ones(k, device=device) if importance is None else importance.to(device, torch.float32)

    error = torch.empty(n, dtype=torch.float32, device=device)
    norm = torch.empty(n, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float()
        words[block], scale[block] = _solve(x, importance)
        made = IQ2XXSWeight(spec, words[block], scale[block]).dequantize(torch.float32)
        error[block] = made.sub_(x).square_().sum(1)
        norm[block] = x.square().sum(1)

    solve_rows(solve, n, k, device, CHUNKS)
    return QuantizedWeight(IQ2XXSWeight(spec, words, scale), total(error), total(norm))


def _solve(x: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return `words` and `scale` of rows x [rows, K]; importance: [K]."""
    rows = x.shape[0]
    vectors, weights = x.view(-1, LENGTH), importance.expand_as(x).reshape(-1, LENGTH)
    magnitudes, patterns = _signs_apart(vectors, weights)
    codebook = grid(x.device)
    dots = (weights * magnitudes) @ codebook.T
    squares = weights @ codebook.square().T
    dots.mul_(-2)
    scratch = torch.empty_like(dots)

    scale = _search(magnitudes, dots, squares, scratch)
    for fit in range(FITS + 1):
        entry = _nearest(dots, squares, scale, scratch)
        dot = _by_block(dots.gather(1, entry)).mul_(-0.5)
        square = _by_block(squares.gather(1, entry))
        if fit == 0:
            scale = torch.where(square > 0, dot / square, scale).clamp_(min=0)
        super_scale, codes = _fit(scale if fit == 0 else dot / square.clamp(min=1e-38), dot, square)
        scale = (super_scale.unsqueeze(-1) * (2 * codes + 1) / 8).view(-1)
    indices, patterns = (t.view(rows, -1, VECTORS) for t in (entry, patterns))
    return pack_iq2_xxs(indices, patterns, codes.view(rows, -1)), super_scale.view(rows, -1).to(torch.float16)


def _signs_apart(vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes for an even number of minus signs (one may be negative), and the seven stored
    signs.
    """
    negative = vectors < 0
    cost = torch.where(vectors != 0, weights * vectors.abs(), 0.0)
    turned = cost.argmin(1, keepdim=True)
    odd = (negative.sum(1, keepdim=True) & 1).bool()
    negative.scatter_(1, turned, negative.gather(1, turned) ^ odd)
    bits = torch.arange(SIGN_BITS, dtype=torch.int32, device=vectors.device)
    patterns = (negative[:, :SIGN_BITS].int() << bits).sum(1, dtype=torch.int32)
    return torch.where(negative, -vectors, vectors), patterns


def _search(magnitudes: Tensor, dots: Tensor, squares: Tensor, scratch: Tensor) -> Tensor:
    """Return the best of the candidate scales of every block, [blocks]."""
    largest = magnitudes.abs().view(-1, BLOCK).amax(1) / MAGNITUDES[-1]
    best = torch.full_like(largest, torch.inf)
    scale = largest.clone()
    for ratio in RATIOS:
        tried = largest * ratio
        spread = _spread(tried)
        least = torch.addcmul(dots, squares, spread, out=scratch).amin(1, keepdim=True)
        error = _by_block(least.mul_(spread))
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
    return scale


def _nearest(dots: Tensor, squares: Tensor, scale: Tensor, scratch: Tensor) -> Tensor:
    """Return the codebook entry of every vector [vectors, 1] with the least error at its block's scale."""
    return torch.addcmul(dots, squares, _spread(scale), out=scratch).argmin(1, keepdim=True)


def _fit(wanted: Tensor, dot: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best super-block scales [super-blocks], in fp16's numbers, and blocks' codes [super-blocks,
    8].

    A block's error at scale s is `s² square - 2 s dot` above that of zero.
    """
    wanted, dot, square = (t.view(-1, BLOCKS) for t in (wanted, dot, square))
    highest = wanted.amax(1) * (8 / (2 * MAX_CODE + 1))
    best = torch.full_like(highest, torch.inf)
    scale, codes = highest.clone(), torch.zeros_like(wanted)
    for ratio in SUPER_RATIOS:
        tried = (highest * ratio).to(torch.float16).float()
        step = (tried / 4).clamp(min=1e-30).unsqueeze(1)
        code = (wanted / step - 0.5).round_().clamp_(0, MAX_CODE)
        stored = (code + 0.5) * step
        error = (stored * (stored * square - 2 * dot)).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
        codes = torch.where(better.unsqueeze(1), code, codes)
    return scale, codes


def _spread(scale: Tensor) -> Tensor:
    """Repeat each block's scale [blocks] for its vectors: [vectors, 1]."""
    return scale.repeat_interleave(VECTORS).unsqueeze(1)


def _by_block(values: Tensor) -> Tensor:
    """Return the sum of each block's vectors, [blocks], from `values` [vectors, 1]."""
    return values.view(-1, VECTORS).sum(1)
