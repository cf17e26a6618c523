"""The INT4 quantizer: our least squares for integer zero points, torchao's HQQ for fractional ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.int4 import Int4, Int4Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.second_order import Curvature
from .int4_least_squares import quantize_int4
from .int4_second_order import second_order_int4
from .integer_levels import IntegerLevels, int4_levels
from .quantizer import QUANTIZERS, QuantizedWeight
from .torchao_hqq import quantize_int4_fractional


class Int4Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, Int4) else f"the INT4 quantizer does not make {spec.label}"

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        if not isinstance(spec, Int4):
            raise ValueError(self.refuses(spec))
        solve = quantize_int4 if spec.has_integer_zero else quantize_int4_fractional
        return solve(values, spec, scale_dtype)

    def columns_together(self, spec: WeightFormat) -> int:
        return _integer_zero(spec).group_size

    def correct(
        self,
        values: Tensor,
        spec: WeightFormat,
        scale_dtype: torch.dtype,
        shared: Mapping[str, Tensor],
        curvature: Curvature,
    ) -> QuantizedWeight:
        return second_order_int4(values, _integer_zero(spec), scale_dtype, curvature)

    def levels(self, weight: Weight) -> IntegerLevels:
        if not isinstance(weight, Int4Weight):
            raise ValueError(self.refuses(weight.spec))
        return int4_levels(weight)


def _integer_zero(spec: WeightFormat) -> Int4:
    if not isinstance(spec, Int4) or not spec.has_integer_zero:
        raise ValueError(f"GPTQ and AWQ need integer zero points; got {spec.label}")
    return spec


QUANTIZERS.add(Int4.name, Int4Quantizer())
