"""INT8 in compressed-tensors, `pack-quantized`: four codes to an int32, least significant first, 128 added.

The tensors are those of `packed_words.py`. Only weights are quantized, symmetrically, in groups or whole
rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....base.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.int8 import WHOLE_ROW, Int8, Int8Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from . import packed_words
from .packed_words import PackedWords, packed_tensors, weights_config
from .scheme import SCHEMES

BITS = 8
SIGN = 0x80
"""Flipping this bit of a signed byte gives the unsigned byte that is larger by 128."""


class PackQuantizedInt8:
    format = packed_words.FORMAT
    reads = "symmetric INT8 weight-only pack-quantized"
    suffix = packed_words.PACKED
    dtypes = None

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        return packed_words.recognizes(group, BITS) and group.get("input_activations") is None

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        packed = PackedWords.of(checkpoint, module, group["weights"])
        if not packed.symmetric:
            raise UserError(
                f"{checkpoint.source}: {module} is INT8 with zero points; Scalegate reads {self.reads}"
            )
        try:
            spec = Int8(packed.group_size or WHOLE_ROW)
        except ValueError as error:
            raise UserError(
                f"{checkpoint.source}: {module} is stored in a form of INT8 that Scalegate does not read: "
                f"{error}"
            ) from error

        def make(codes: Tensor, scale: Tensor) -> Int8Weight:
            return Int8Weight(spec, (codes ^ SIGN).view(torch.int8), scale)

        return packed.stored(spec, make)

    def refuses(self, spec: WeightFormat) -> str | None:
        is_stored = isinstance(spec, Int8) and not spec.rounds_inputs
        return None if is_stored else f"{self.format} of 8 bits cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, Int8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return packed_tensors(module, weight, weight.codes.view(torch.uint8) ^ SIGN, weight.scale)

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        if not isinstance(spec, Int8):
            raise ValueError(self.refuses(spec))
        return weights_config(BITS, spec.group_size if spec.has_groups else None, symmetric=True)

    def inputs_config(self, spec: WeightFormat) -> None:
        return None


SCHEMES.add(Int8.name, PackQuantizedInt8())
