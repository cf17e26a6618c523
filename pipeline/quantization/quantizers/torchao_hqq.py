"""torchao's own HQQ, with its fractional zero points, in our weight format; only torchao's form stores it.

HQQ is not the default: `int4_least_squares.py` is faster, more accurate and readable by every engine.
"""

import torch
from torch import Tensor

from ....layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from .quantizer import QuantizedWeight

BITS = 4


def quantize_int4_fractional(weight: Tensor, spec: Int4, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] by torchao's function, on the weight's own device."""
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq

    k = weight.shape[1]
    refusal = spec.refuses(*weight.shape)
    if refusal is not None:
        raise ValueError(refusal)
    codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
        weight,
        BITS,
        k // spec.groups(k),
        compute_dtype=torch.float32,
        device=str(weight.device),
        raw_output=True,
    )
    quantized = Int4Weight(spec, pack_nibbles(codes), scale.to(scale_dtype), zero)
    original = weight.float()
    error = (quantized.dequantize(torch.float32) - original).square().sum(dtype=torch.float64)
    return QuantizedWeight(quantized, float(error), float(original.square().sum(dtype=torch.float64)))
