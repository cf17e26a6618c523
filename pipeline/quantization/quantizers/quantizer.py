"""The quantizer seam: from float weights to a weight format's numbers.

There is one file in this folder for each quantizer, named after its format; `all_quantizers.py` registers the
quantizers. A quantizer reads no file and knows no checkpoint: `weight_tensors.py` hands it blocks of rows and
puts the results together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ....base.registry import Registry
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import Weight, WeightFormat
from ..solvers.levels import Levels
from ..solvers.second_order import Curvature


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight and how far it is from the original.

    weight:        [N, K]
    squared_error: the sum of (dequantized - original)² over all of it
    squared_norm:  the sum of original²
    """

    weight: Weight
    squared_error: float
    squared_norm: float

    @property
    def relative_error(self) -> float:
        """‖W − dequantized‖ / ‖W‖."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0


class Quantizer(Protocol):
    """Makes the weights of one format."""

    def refuses(self, spec: WeightFormat) -> str | None:
        """Return None if the quantizer makes weights of `spec`, otherwise the reason in a few words."""
        ...

    def quantize(
        self, values: Tensor, spec: WeightFormat, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Quantize a block of rows of a weight, on the weight's device.

        values:      any float dtype [rows, K], all finite; K is one that `spec` takes
        scale_dtype: bf16 or fp16, the dtype of scales if the format leaves it open
        shared:      the tensors that `spec.shared` names, on the same device; none for most formats

        A row's numbers may depend on that row alone, or on the `rows_together` of its spec: a weight is
        quantized a block of rows at a time.
        """
        ...


@runtime_checkable
class WeighingQuantizer(Quantizer, Protocol):
    """A quantizer that takes into account how much each input matters."""

    def quantize_weighted(self, values: Tensor, spec: WeightFormat, importance: Tensor) -> QuantizedWeight:
        """Quantize like `quantize`, but count the error of column k `importance[k]` times; fp32 [K],
        positive.
        """
        ...


@runtime_checkable
class CorrectingQuantizer(Quantizer, Protocol):
    """A quantizer that can minimize the error of a layer's outputs instead of its weights'."""

    def columns_together(self, spec: WeightFormat) -> int:
        """Return the number of consecutive columns that are solved together, which is the number of columns
        in a group.
        """
        ...

    def correct(
        self,
        values: Tensor,
        spec: WeightFormat,
        scale_dtype: torch.dtype,
        shared: Mapping[str, Tensor],
        curvature: Curvature,
    ) -> QuantizedWeight:
        """Quantize like `quantize`, for all rows at once, given the curvature of the inputs
        (`second_order.py`).
        """
        ...

    def levels(self, weight: Weight) -> Levels:
        """Return the levels that a weight's numbers may move to (`learned_rounding.py`), on the device of
        `weight`.
        """
        ...


@runtime_checkable
class SharingQuantizer(Quantizer, Protocol):
    """A quantizer of a format with tensors that merged weights share: these tensors are found before anything
    is quantized.
    """

    def measure(self, values: Tensor) -> float:
        """Return a number computed from rows [rows, K]; the largest over all blocks decides the shared
        tensors.
        """
        ...

    def shared_tensors(self, spec: WeightFormat, largest: float) -> dict[str, Tensor]:
        """Return the tensors that `spec.shared` names; largest: the result of `measure` over all weights that
        share them
        """
        ...


@runtime_checkable
class CalibratingQuantizer(Quantizer, Protocol):
    """A quantizer of a format that can also round a layer's input, with scales from a calibration text."""

    def calibrates(self, spec: WeightFormat) -> bool:
        """Say whether `spec` rounds inputs as well."""
        ...

    def input_format(self, spec: WeightFormat, largest: float) -> InputFormat:
        """Return how an input is rounded if its largest magnitude on the text is `largest`."""
        ...


QUANTIZERS: Registry[Quantizer] = Registry("quantizer")
