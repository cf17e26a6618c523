"""The INT8 quantizer: least squares, or second order if a text is read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.int8 import Int8, Int8Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.second_order import Curvature
from .int8_least_squares import quantize_int8
from .int8_second_order import second_order_int8
from .integer_levels import IntegerLevels, int8_levels
from .quantizer import QUANTIZERS, QuantizedWeight


class Int8Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, Int8) else f"the INT8 quantizer does not make {spec.label}"

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        if not isinstance(spec, Int8):
            raise ValueError(self.refuses(spec))
        return quantize_int8(values, spec, scale_dtype)

    def columns_together(self, spec: WeightFormat) -> int:
        return _grouped(spec).group_size

    def correct(
        self,
        values: Tensor,
        spec: WeightFormat,
        scale_dtype: torch.dtype,
        shared: Mapping[str, Tensor],
        curvature: Curvature,
    ) -> QuantizedWeight:
        return second_order_int8(values, _grouped(spec), scale_dtype, curvature)

    def levels(self, weight: Weight) -> IntegerLevels:
        if not isinstance(weight, Int8Weight):
            raise ValueError(self.refuses(weight.spec))
        return int8_levels(weight)


def _grouped(spec: WeightFormat) -> Int8:
    if not isinstance(spec, Int8) or not spec.has_groups:
        raise ValueError(f"GPTQ and AWQ need groups; got {spec.label}")
    return spec


QUANTIZERS.add(Int8.name, Int8Quantizer())
