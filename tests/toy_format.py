"""A plugin with all that a weight format needs: INT8, symmetric, one scale a row.

Its spec and weight, its quantizer, its place in compressed-tensors (`int-quantized`, which other engines read
too) and a layout for the CPU. Nothing in the sources knows of it: `SCALEGATE_PLUGINS` names this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scalegate.layouts.formats.weight_format import WEIGHT_FORMATS, Weight
from scalegate.layouts.packing.layout import LAYOUTS, PackedWeight, Problem, Serves
from scalegate.pipeline.conventions.compressed_tensors.scheme import SCHEMES
from scalegate.pipeline.conventions.convention import StoredWeight
from scalegate.pipeline.conventions.stored import FLOAT_DTYPES, require_tensor
from scalegate.pipeline.quantization.quantizers.quantizer import QUANTIZERS, QuantizedWeight
from torch import Tensor

MAX_CODE = 127


@dataclass(frozen=True)
class Int8Row:
    name: ClassVar[str] = "int8-row"
    shared: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = 1
    label: ClassVar[str] = "INT8, a scale a row"
    key: ClassVar[str] = "int8 row"

    @property
    def weight_class(self) -> "type[Int8RowWeight]":
        return Int8RowWeight

    def refuses(self, n: int, k: int) -> str | None:
        return None

    def nearest(self, n: int, k: int) -> "Int8Row":
        return self

    def beside_experts(self) -> "Int8Row":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 8 + 16 / k

    def nbytes(self, n: int, k: int) -> int:
        return n * k + 2 * n

    def random(self, n: int, k: int, device: torch.device) -> "Int8RowWeight":
        codes = torch.randint(-MAX_CODE, MAX_CODE + 1, (n, k), dtype=torch.int8, device=device)
        scale = torch.rand(n, 1, device=device).add(0.5).mul(0.0005).to(torch.bfloat16)
        return Int8RowWeight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[Int8Row]":
        return [cls()]


@dataclass(frozen=True)
class Int8RowWeight(Weight):
    """codes: int8 [N, K] of -127..127; scale: float [N, 1]; `w[n, k] = codes[n, k] * scale[n]`."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (self.codes.float() * self.scale.float()).to(dtype)


class RoundToNearest:
    def refuses(self, spec: Any) -> str | None:
        return None

    def quantize(
        self, values: Tensor, spec: Any, scale_dtype: torch.dtype, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        x = values.float()
        scale = (x.abs().amax(1, keepdim=True) / MAX_CODE).clamp(min=1e-8).to(scale_dtype)
        codes = (x / scale.float()).round().clamp(-MAX_CODE, MAX_CODE).to(torch.int8)
        weight = Int8RowWeight(spec, codes, scale)
        error = (weight.dequantize(torch.float32) - x).double()
        return QuantizedWeight(weight, float(error.square().sum()), float(x.double().square().sum()))


class IntQuantized:
    format = "int-quantized"
    reads = "INT8 weight-only int-quantized"
    suffix = ".weight"
    dtypes = (torch.int8,)

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights = group.get("weights") or {}
        wanted = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        return (
            group["format"] == self.format
            and wanted.items() <= weights.items()
            and group.get("input_activations") is None
        )

    def stored(self, checkpoint: Any, module: str, group: Mapping[str, Any]) -> StoredWeight:
        codes, scale = f"{module}.weight", f"{module}.weight_scale"
        n, k = require_tensor(checkpoint, codes, (torch.int8,)).shape
        require_tensor(checkpoint, scale, FLOAT_DTYPES, (n, 1))

        def read() -> Int8RowWeight:
            return Int8RowWeight(Int8Row(), checkpoint.read(codes), checkpoint.read(scale))

        return StoredWeight(module, (n, k), Int8Row(), (codes, scale), read)

    def refuses(self, spec: Any) -> str | None:
        return None

    def tensors(self, module: str, weight: Weight, inputs: None = None) -> dict[str, Tensor]:
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale": weight.scale}

    def weights_config(self, spec: Any) -> dict[str, Any]:
        return {
            "num_bits": 8,
            "type": "int",
            "strategy": "channel",
            "group_size": None,
            "symmetric": True,
            "dynamic": False,
        }

    def inputs_config(self, spec: Any) -> None:
        return None


class ToyInt8:
    """`(x @ codes.T) * scale` in fp32."""

    name = "toy_int8"
    kernel = "toy int8 product"

    def refuses(self, problem: Problem) -> str | None:
        return Serves((Int8Row,), "cpu").refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        tensors = {"codes": weight.codes, "scale": weight.scale.float().flatten()}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        y = x.float() @ packed.tensors["codes"].float().T
        return (y * packed.tensors["scale"]).to(x.dtype)


WEIGHT_FORMATS.add(Int8Row.name, Int8Row)
QUANTIZERS.add(Int8Row.name, RoundToNearest())
SCHEMES.add(Int8Row.name, IntQuantized())
LAYOUTS.add(ToyInt8.name, ToyInt8())
