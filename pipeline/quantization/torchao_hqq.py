"""torchao's own HQQ, with its fractional zero points, in our weight format; only torchao's form stores it.

Not the default: `int4_least_squares.py` is faster, more accurate and readable by every engine.
"""

import torch
from torch import Tensor

from ...layouts.int4 import Int4Weight, pack_nibbles
from .int4_least_squares import Solved

BITS = 4


def quantize_int4_fractional(weight: Tensor, group_size: int, scale_dtype: torch.dtype) -> Solved:
    """Quantize finite `weight` [N, K] by torchao's function, on the device it lies on."""
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq

    k = weight.shape[1]
    if k % group_size:
        raise ValueError(f"group size {group_size} does not divide K = {k}")
    codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
        weight,
        nbits=BITS,
        group_size=group_size,
        compute_dtype=torch.float32,
        device=str(weight.device),
        raw_output=True,
    )
    quantized = Int4Weight(pack_nibbles(codes), scale.to(scale_dtype), zero, group_size)
    original = weight.float()
    error = (quantized.dequantize(torch.float32) - original).square().sum(dtype=torch.float64)
    return Solved(quantized, float(error), float(original.square().sum(dtype=torch.float64)))
