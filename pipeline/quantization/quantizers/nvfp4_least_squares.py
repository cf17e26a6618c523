"""Our NVFP4 solver: for each 16 weights, the E4M3 scale with the least squared error. It reads no file.

With s = e4m3 · global, the best codes of a group x are the nearest ones to x/s, so its error is a function of
its scale alone, and the search tries scales: from two E4M3 codes below the one that makes the largest weight
6 to six above it. The scales that are tried include the one that makes the largest weight 4 ("four over six":
if the largest is 4, the codes are closer together). On trained weights, other scales change no digit of a
model's error.

The global scale is a power of two. E4M3 is a floating-point grid and as fine under any global scale; under a
power of two each product of code, scale and global scale is exact in bf16 and fp32, and so are the reciprocal
and every order in which a reader multiplies or divides. The judged values are bit for bit the served ones.

Groups lie along the last dimension and elements along the first ([16, groups]); a sum adds one half of the
numbers to the other, again and again. Only single IEEE operations in a fixed order touch a number, so the
bits do not depend on threads, chunks or the device.
"""

import math

import torch
from torch import Tensor

from ....layouts.formats.int4 import pack_nibbles
from ....layouts.formats.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP_SIZE, NVFP4, NVFP4Weight
from ..solvers.column_sums import fold, solve_rows, total
from .quantizer import QuantizedWeight

CODES_BELOW, CODES_ABOVE = 2, 6
LARGEST_CODE_OF_FINER_GRID = 4.0
LARGEST_E4M3 = 0x7E
"""The E4M3 byte of 448; the next byte is NaN."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -100, 100
"""Exponents of global scales, within which reciprocals and products with E4M3 stay normal numbers."""
ONE, EXPONENT_BITS = 1.0, 0x7F800000
TO_HALF_SPACING = 2.0**22
"""Of fp32, which has 23 bits of mantissa: 2^(e+22) + y rounds y to multiples of 2^(e-1)."""


def shared_global_scale(largest: float, code: float = LARGEST_CODE_OF_FINER_GRID) -> Tensor:
    """Return an fp32 scalar: the least power of two under which 448 reaches the scale of `largest` as
    `code`.
    """
    if largest == 0:
        return torch.tensor(1.0)
    exponent = math.ceil(math.log2(largest) - math.log2(code * E4M3_MAX))
    return torch.tensor(2.0 ** min(max(exponent, SMALLEST_EXPONENT), LARGEST_EXPONENT))


def quantize_nvfp4(weight: Tensor, spec: NVFP4, global_scale: Tensor) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device.

    global_scale: fp32 scalar on that device; whatever it is, the search is the same
    """
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    groups = k // GROUP_SIZE
    device = weight.device
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(n, groups, dtype=torch.uint8, device=device)
    error = torch.empty(n, groups, dtype=torch.float32, device=device)
    norm = torch.empty(n, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().view(-1, GROUP_SIZE).T.contiguous()
        magnitude = x.abs()
        chosen = _search(magnitude, global_scale)
        value = _step(chosen, global_scale)
        q = nearest_e2m1(magnitude, _reciprocal(value))
        nibbles = codes_of(q) | (x.signbit() & (q > 0)).to(torch.uint8) << 3
        remainder = magnitude - q * value
        error[block] = fold(remainder.mul_(remainder)).view(-1, groups)
        norm[block] = fold(magnitude.mul_(magnitude)).view(-1, groups)
        codes[block] = pack_nibbles(nibbles.T.contiguous().view(-1, k))
        scale[block] = chosen.view(-1, groups)

    solve_rows(solve, n, k, device)
    quantized = NVFP4Weight(spec, codes, scale.view(torch.float8_e4m3fn), global_scale)
    return QuantizedWeight(quantized, total(error), total(norm))


def _search(x: Tensor, global_scale: Tensor) -> Tensor:
    """Return the E4M3 byte, uint8, of the best scale of each column of magnitudes x [16, groups]."""
    wanted = (x.amax(0) / (E2M1_MAX * global_scale)).clamp_(max=E4M3_MAX)
    first = wanted.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    scratch = torch.empty_like(x), torch.empty_like(x)
    best = torch.full_like(wanted, -torch.inf)
    chosen = torch.zeros_like(first, dtype=torch.uint8)
    # From the base outwards, so that of equal scales the usual one stays.
    for offset in sorted(range(-CODES_BELOW, CODES_ABOVE + 1), key=abs):
        candidate = (first + offset).clamp_(0, LARGEST_E4M3).to(torch.uint8)
        explained = _explained(x, _step(candidate, global_scale), scratch)
        better = explained > best
        best = torch.where(better, explained, best)
        chosen = torch.where(better, candidate, chosen)
    return chosen


def _explained(x: Tensor, step: Tensor, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the reduction of `<x, x>` by the nearest codes: `step · (2<x, q> - step · <q, q>)`."""
    q = nearest_e2m1(x, _reciprocal(step), scratch)
    dot = fold(torch.mul(x, q, out=scratch[1]))
    square = fold(q.mul_(q))
    return step * (2 * dot - step * square)


def nearest_e2m1(x: Tensor, reciprocal: Tensor, scratch: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return magnitudes of the nearest codes of magnitudes x [16, groups], ties to the even code, in fp32.

    Codes are 0.5 apart below 2, 1 apart from 2 to 4, then 2 apart: half of the largest power of two that is
    not above y (1 for small y). Adding and subtracting that power times 2^22 rounds to this spacing, since
    fp32 then has no bits for anything finer.
    """
    y, power = (torch.empty_like(x), torch.empty_like(x)) if scratch is None else scratch
    torch.mul(x, reciprocal, out=y).clamp_(max=E2M1_MAX)
    torch.clamp(y, min=ONE, out=power)
    power.view(torch.int32).bitwise_and_(EXPONENT_BITS)
    power.mul_(TO_HALF_SPACING)
    return y.add_(power).sub_(power)


def codes_of(magnitude: Tensor) -> Tensor:
    """Return uint8 codes 0..7 of 0, 0.5, 1, 1.5, 2, 3, 4 and 6: below 2 twice the value, from 2 on one less
    and so on.
    """
    doubled = magnitude * 2
    above_two = torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4)
    return torch.where(magnitude < 2, doubled, above_two).to(torch.uint8)


def _step(scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the value of a code of 1, fp32, from E4M3 bytes."""
    return scale.view(torch.float8_e4m3fn).float() * global_scale


def _reciprocal(step: Tensor) -> Tensor:
    """Return 1/step, and 0 if step is 0: such a group is all zeros."""
    return torch.where(step > 0, 1.0 / step, 0.0)
