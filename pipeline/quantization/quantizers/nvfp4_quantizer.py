"""The NVFP4 quantizer: our least squares, under a global scale that merged weights share."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.nvfp4 import E2M1_MAX, GROUP_SIZE, NVFP4, NVFP4Input, NVFP4Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.second_order import Curvature
from .nvfp4_least_squares import quantize_nvfp4, shared_global_scale
from .nvfp4_levels import NVFP4Levels
from .nvfp4_second_order import second_order_nvfp4
from .quantizer import QUANTIZERS, QuantizedWeight


class NVFP4Quantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, NVFP4) else f"the NVFP4 quantizer does not make {spec.label}"

    def measure(self, values: Tensor) -> float:
        """Return the largest magnitude of the weights."""
        return float(values.abs().amax())

    def shared_tensors(self, spec: WeightFormat, largest: float) -> dict[str, Tensor]:
        return {"global_scale": shared_global_scale(largest)}

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Scales are E4M3 and fp32 by the format's definition, whatever `scale_dtype` is."""
        if not isinstance(spec, NVFP4):
            raise ValueError(self.refuses(spec))
        return quantize_nvfp4(values, spec, shared["global_scale"])

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
        if not isinstance(spec, NVFP4):
            raise ValueError(self.refuses(spec))
        return second_order_nvfp4(values, spec, shared["global_scale"], curvature)

    def levels(self, weight: Weight) -> NVFP4Levels:
        if not isinstance(weight, NVFP4Weight):
            raise ValueError(self.refuses(weight.spec))
        return NVFP4Levels(weight)

    def calibrates(self, spec: WeightFormat) -> bool:
        return isinstance(spec, NVFP4) and spec.activations

    def input_format(self, spec: WeightFormat, largest: float) -> NVFP4Input:
        """Return the input format whose global scale is the least power of two with which 448 times 6 reaches
        `largest`."""
        return NVFP4Input(shared_global_scale(largest, E2M1_MAX), divides=False)


QUANTIZERS.add(NVFP4.name, NVFP4Quantizer())
