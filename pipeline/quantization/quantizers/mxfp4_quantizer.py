"""The MXFP4 quantizer: the best power of two for every 32 weights, or GPTQ with these scales in its loop."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.mxfp4 import GROUP_SIZE, MXFP4, MXFP4Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.second_order import Curvature
from .mxfp4_least_squares import quantize_mxfp4
from .mxfp4_second_order import MXFP4Levels, second_order_mxfp4
from .quantizer import QUANTIZERS, QuantizedWeight


class MXFP4Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, MXFP4) else f"the MXFP4 quantizer does not make {spec.label}"

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Scales are E8M0 by the format's definition, whatever `scale_dtype` is."""
        if not isinstance(spec, MXFP4):
            raise ValueError(self.refuses(spec))
        return quantize_mxfp4(values, spec)

    def columns_together(self, spec: WeightFormat) -> int:
        return GROUP_SIZE

    def correct(
        self,
        values: Tensor,
        spec: WeightFormat,
        scale_dtype: torch.dtype,
        shared: Mapping[str, Tensor],
        curvature: Curvature,
    ) -> QuantizedWeight:
        if not isinstance(spec, MXFP4):
            raise ValueError(self.refuses(spec))
        return second_order_mxfp4(values, spec, curvature)

    def levels(self, weight: Weight) -> MXFP4Levels:
        if not isinstance(weight, MXFP4Weight):
            raise ValueError(self.refuses(weight.spec))
        return MXFP4Levels(weight)


QUANTIZERS.add(MXFP4.name, MXFP4Quantizer())
