"""The MXFP8 quantizer: for every 32 weights, the power of two under which E4M3 has the least squared error.

Under any power of two E4M3 has the same precision, so the choice is between losing the smallest weights among
subnormals and clipping the largest: the search tries the least scale that clips nothing, and its half. Only
single IEEE operations in a fixed order touch a number, so the bits do not depend on threads, chunks or the
device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.e4m3 import E4M3
from ....layouts.formats.mxfp4 import GROUP_SIZE, from_e8m0
from ....layouts.formats.mxfp8 import MXFP8, MXFP8Weight, scale_bytes
from ....layouts.formats.weight_format import WeightFormat
from ..solvers.column_sums import fold, solve_rows, total
from .fp8_least_squares import nearest_e4m3
from .quantizer import QUANTIZERS, QuantizedWeight


class MXFP8Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, MXFP8) else f"the MXFP8 quantizer does not make {spec.label}"

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Scales are E8M0 by the format's definition, whatever `scale_dtype` is."""
        if not isinstance(spec, MXFP8):
            raise ValueError(self.refuses(spec))
        return quantize_mxfp8(values, spec)


def quantize_mxfp8(weight: Tensor, spec: MXFP8) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device."""
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    groups, device = k // GROUP_SIZE, weight.device
    codes = torch.empty(n, k, dtype=E4M3, device=device)
    scale = torch.empty(n, groups, dtype=torch.uint8, device=device)
    error = torch.empty(n, groups, dtype=torch.float32, device=device)
    norm = torch.empty(n, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().view(-1, GROUP_SIZE).T.contiguous()
        usual = scale_bytes(x.abs().amax(0))
        smaller = (usual - 1).clamp_(min=0)
        best, squares = _codes(x, usual)
        clipped, with_clipping = _codes(x, smaller)
        is_better = with_clipping < squares
        best = torch.where(is_better, clipped, best)
        byte = torch.where(is_better, smaller, usual)
        codes[block] = best.T.reshape(-1, k).to(E4M3)
        error[block] = torch.minimum(with_clipping, squares).view(-1, groups)
        norm[block] = fold(x.mul_(x)).view(-1, groups)
        scale[block] = byte.to(torch.uint8).view(-1, groups)

    solve_rows(solve, n, k, device)
    return QuantizedWeight(MXFP8Weight(spec, codes, scale), total(error), total(norm))


def _codes(x: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of x [32, groups] under the scales of `byte`, in fp32, and their squared
    errors.
    """
    step = from_e8m0(byte)
    q = nearest_e4m3(x, step)
    return q, fold((q * step).sub_(x).square_())


QUANTIZERS.add(MXFP8.name, MXFP8Quantizer())
