"""The IQ2_XXS quantizer: our search of the codebook and of the scales."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....layouts.formats.iq2_xxs import IQ2XXS
from ....layouts.formats.weight_format import WeightFormat
from .iq2_xxs_search import quantize_iq2_xxs
from .quantizer import QUANTIZERS, QuantizedWeight


class IQ2XXSQuantizer:
    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, IQ2XXS) else f"the IQ2_XXS quantizer does not make {spec.label}"

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Scales are fp16 by the format's definition, whatever `scale_dtype` is."""
        if not isinstance(spec, IQ2XXS):
            raise ValueError(self.refuses(spec))
        return quantize_iq2_xxs(values, spec)

    def quantize_weighted(self, values: Tensor, spec: WeightFormat, importance: Tensor) -> QuantizedWeight:
        if not isinstance(spec, IQ2XXS):
            raise ValueError(self.refuses(spec))
        return quantize_iq2_xxs(values, spec, importance)


QUANTIZERS.add(IQ2XXS.name, IQ2XXSQuantizer())
