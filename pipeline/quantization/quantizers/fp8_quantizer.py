"""The FP8 quantizer: it finds the best scale for each row or block, or one scale that merged weights
share.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.e4m3 import E4M3StaticInput
from ....layouts.formats.fp8 import BLOCKS, FP8
from ....layouts.formats.weight_format import WeightFormat
from .fp8_least_squares import quantize_fp8, quantize_fp8_blocks, scale_of_inputs, shared_scale
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

    def calibrates(self, spec: WeightFormat) -> bool:
        return isinstance(spec, FP8) and spec.is_static

    def input_format(self, spec: WeightFormat, largest: float) -> E4M3StaticInput:
        return E4M3StaticInput(scale_of_inputs(largest))


QUANTIZERS.add(FP8.name, FP8Quantizer())
