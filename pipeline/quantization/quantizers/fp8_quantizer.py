"""The FP8 quantizer: it finds the best scale for each row or block, or one scale that merged weights
share.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.e4m3 import E4M3StaticInput
from ....layouts.formats.fp8 import BLOCKS, FP8, FP8Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.second_order import Curvature
from .fp8_least_squares import quantize_fp8, quantize_fp8_blocks, scale_of_inputs, shared_scale
from .fp8_second_order import COLUMNS, FP8Levels, second_order_fp8
from .quantizer import QUANTIZERS, QuantizedWeight


class FP8Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, FP8) else f"the FP8 quantizer does not make {spec.label}"

    def measure(self, values: Tensor) -> float:
        """Return the largest magnitude of the weights."""
        return float(values.abs().amax())

    def shared_tensors(self, spec: WeightFormat, largest: float) -> dict[str, Tensor]:
        return {"scale": shared_scale(largest)}

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        if not isinstance(spec, FP8):
            raise ValueError(self.refuses(spec))
        if spec.scale == BLOCKS:
            return quantize_fp8_blocks(values, spec)
        return quantize_fp8(values, spec, scale_dtype, shared.get("scale"))

    def columns_together(self, spec: WeightFormat) -> int:
        _without_blocks(spec)
        return COLUMNS

    def correct(
        self,
        values: Tensor,
        spec: WeightFormat,
        scale_dtype: torch.dtype,
        shared: Mapping[str, Tensor],
        curvature: Curvature,
    ) -> QuantizedWeight:
        found = quantize_fp8(values, _without_blocks(spec), scale_dtype, shared.get("scale")).weight
        return second_order_fp8(values, _fp8(found), curvature)

    def levels(self, weight: Weight) -> FP8Levels:
        return FP8Levels(_fp8(weight))

    def calibrates(self, spec: WeightFormat) -> bool:
        return isinstance(spec, FP8) and spec.is_static

    def input_format(self, spec: WeightFormat, largest: float) -> E4M3StaticInput:
        return E4M3StaticInput(scale_of_inputs(largest))


def _without_blocks(spec: WeightFormat) -> FP8:
    if not isinstance(spec, FP8) or spec.scale == BLOCKS:
        raise ValueError(f"GPTQ needs one scale for a row or for all; got {spec.label}")
    return spec


def _fp8(weight: Weight) -> FP8Weight:
    if not isinstance(weight, FP8Weight):
        raise ValueError(f"not FP8 but {weight.spec.label}")
    return weight


QUANTIZERS.add(FP8.name, FP8Quantizer())
