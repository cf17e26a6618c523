"""FP8: for each row or block, the scale under which E4M3 has the least squared error. It reads no file.

E4M3 is a floating-point grid: under a scale twice as large it has the same values, down to subnormals. All
different grids are therefore covered by one octave of scales, from the scale that makes the row's largest
weight 448 downwards. The search tries this octave in even steps; then the best grid's codes are scaled once
more to fit the row. On weights of the bundled checkpoint, the error is 8% smaller than with the scale of the
largest weight.

Rows lie along the last dimension and the weights of a row along the first ([K, rows]); a sum adds one half of
the numbers to the other, again and again. Only single IEEE operations in a fixed order touch a number, so the
bits do not depend on threads, chunks or the device.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ....layouts.formats.e4m3 import BLOCK, E4M3, E4M3_MAX
from ....layouts.formats.fp8 import FP8, ROW, FP8Weight, to_rows
from ..solvers.column_sums import fold, solve_rows, total
from .quantizer import QuantizedWeight

RATIOS = tuple(2.0 ** (i / 16) for i in range(16))
SMALLEST = 2.0**-120
SMALLEST_NORMAL, EXPONENT_BITS = 2.0**-6, 0x7F800000
TO_SPACING = 1.5 * 2.0**20
"""Of fp32, which has 23 bits of mantissa: adding 1.5 · 2^(e+20) to y of either sign rounds it to multiples of
2^(e-3), E4M3's spacing from 2^e on."""


def shared_scale(largest: float) -> Tensor:
    """Return an fp32 scalar: under this scale, the largest magnitude of a weight is 448.

    No scale of a whole tensor is much better: the errors of so many weights hardly depend on it
    (`tests/bench/results/quantization/calibrated_log.md`).
    """
    return torch.tensor(max(largest / E4M3_MAX, SMALLEST))


def scale_of_inputs(largest: float) -> Tensor:
    """Return an fp32 scalar: the least power of two with which 448 reaches inputs as large as `largest`.

    Under any power of two E4M3 has the same precision, down to subnormals, and bf16 holds the rounded inputs
    exactly. The scale also leaves up to an octave for inputs larger than those of the calibration text.
    """
    if largest == 0:
        return torch.tensor(1.0)
    fraction, exponent = math.frexp(max(largest / E4M3_MAX, SMALLEST))
    return torch.tensor(2.0 ** (exponent - 1 if fraction == 0.5 else exponent))


def quantize_fp8(
    weight: Tensor, spec: FP8, scale_dtype: torch.dtype, shared: Tensor | None
) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device.

    shared: the fp32 scale of the whole weight, on that device, if `spec` has one
    """
    n, k = weight.shape
    device = weight.device
    codes = torch.empty(n, k, dtype=E4M3, device=device)
    scale = torch.empty(n, 1, dtype=scale_dtype, device=device)
    error = torch.empty(n, dtype=torch.float32, device=device)
    norm = torch.empty(n, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().T.contiguous()
        chosen = _search(x, scale_dtype) if shared is None else shared.expand(x.shape[1])
        q = nearest_e4m3(x, chosen)
        codes[block] = q.T.to(E4M3)
        error[block] = fold(q.mul_(chosen).sub_(x).square_())
        norm[block] = fold(x.mul_(x))
        scale[block] = chosen[:, None].to(scale_dtype)

    solve_rows(solve, n, k, device)
    quantized = FP8Weight(spec, codes, scale if spec.scale == ROW else _required(shared))
    return QuantizedWeight(quantized, total(error), total(norm))


def quantize_fp8_blocks(weight: Tensor, spec: FP8) -> QuantizedWeight:
    """Quantize like `quantize_fp8`, in blocks of 128 rows and columns with scales in fp32. Row 0 is the first
    row of a block."""
    n, k = weight.shape
    device, groups, blocks = weight.device, k // BLOCK, -(-n // BLOCK)
    codes = torch.empty(n, k, dtype=E4M3, device=device)
    scale = torch.empty(blocks, groups, dtype=torch.float32, device=device)
    error = torch.empty(blocks, groups, dtype=torch.float32, device=device)
    norm = torch.empty(blocks, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        rows = slice(block.start * BLOCK, min(block.stop * BLOCK, n))
        values = weight[rows].float()
        count = len(scale[block])
        # Rows that the last block lacks are zeros, which cost nothing under any scale.
        padded = functional.pad(values, (0, 0, 0, count * BLOCK - len(values)))
        x = padded.view(count, BLOCK, groups, BLOCK).permute(1, 3, 0, 2).reshape(BLOCK * BLOCK, -1)
        chosen = _search(x, torch.float32)
        q = nearest_e4m3(x, chosen)
        in_rows = q.view(BLOCK, BLOCK, count, groups).permute(2, 0, 3, 1).reshape(-1, k)
        codes[rows] = in_rows[: len(values)].to(E4M3)
        error[block] = fold(q.mul_(chosen).sub_(x).square_()).view(count, groups)
        norm[block] = fold(x.mul_(x)).view(count, groups)
        scale[block] = chosen.view(count, groups)

    solve_rows(solve, blocks, BLOCK * k, device)
    return QuantizedWeight(FP8Weight(spec, codes, to_rows(scale, n)), total(error), total(norm))


def _required(shared: Tensor | None) -> Tensor:
    if shared is None:
        raise ValueError("a weight with one scale needs it before it is quantized")
    return shared


def _search(x: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return fp32 [rows], exact in `scale_dtype`: the best scale of each column of x [K, rows]."""
    base = x.abs().amax(0) / E4M3_MAX
    scratch = torch.empty_like(x), torch.empty_like(x)
    best = torch.full_like(base, -torch.inf)
    chosen, refined = torch.ones_like(base), torch.ones_like(base)
    for ratio in RATIOS:
        step = _stored(base * ratio, scale_dtype)
        explained, fitting = _explained(x, step, scratch)
        better = explained > best
        best = torch.where(better, explained, best)
        chosen, refined = torch.where(better, step, chosen), torch.where(better, fitting, refined)
    refined = _stored(refined, scale_dtype)
    explained, _ = _explained(x, refined, scratch)
    return torch.where(explained > best, refined, chosen)


def _explained(x: Tensor, step: Tensor, scratch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the reduction of `<x, x>` by the nearest codes q, `step · (2<x, q> - step · <q, q>)`, and the
    scale that fits these codes best."""
    q = nearest_e4m3(x, step, scratch)
    dot = fold(torch.mul(x, q, out=scratch[1]))
    square = fold(q.mul_(q))
    return step * (2 * dot - step * square), torch.where(square > 0, dot / square.clamp(min=SMALLEST), step)


def nearest_e4m3(x: Tensor, step: Tensor, scratch: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return the nearest E4M3 values of x [K, rows] divided by `step` [rows], in fp32, ties to the even
    code.
    """
    y, power = (torch.empty_like(x), torch.empty_like(x)) if scratch is None else scratch
    torch.div(x, step, out=y).clamp_(-E4M3_MAX, E4M3_MAX)
    torch.abs(y, out=power).clamp_(min=SMALLEST_NORMAL)
    power.view(torch.int32).bitwise_and_(EXPONENT_BITS)
    power.mul_(TO_SPACING)
    return y.add_(power).sub_(power)


def _stored(step: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return `step` rounded to `scale_dtype`, but never zero."""
    smallest = max(torch.finfo(scale_dtype).smallest_normal * 2.0**-10, SMALLEST)
    return step.clamp(min=smallest).to(scale_dtype).float()
