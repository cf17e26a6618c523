"""INT4 in compressed-tensors, `pack-quantized`: eight codes to an int32, least significant first.

The tensors are those of `packed_words.py`; if the config group is not symmetric, there is also
`weight_zero_point` int32 [N/8, K/g], packed along N. Scales belong to groups or whole rows; inputs are in 16
bits, or in E4M3 token by token (W4A8).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.int4 import (
    FP8_INPUTS,
    SYMMETRIC_ZERO,
    UNQUANTIZED,
    Int4,
    Int4Weight,
    pack_nibbles,
    unpack_nibbles,
)
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import int4_spec, require_tensor
from . import packed_words
from .packed_words import PackedWords, bytes_of, packed_tensors, weights_config, words_of
from .scheme import FP8_PER_TOKEN, METHOD, SCHEMES, rounds_to_fp8

BITS = 4
CODES_PER_WORD = 8


class PackQuantized:
    format = packed_words.FORMAT
    reads = "INT4 pack-quantized, weight-only or with FP8 inputs"
    suffix = packed_words.PACKED
    dtypes = None

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        inputs = group.get("input_activations")
        return packed_words.recognizes(group, BITS) and (inputs is None or rounds_to_fp8(group))

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        packed = PackedWords.of(checkpoint, module, group["weights"])
        group_size, symmetric = packed.group_size or packed.k, packed.symmetric
        activations = FP8_INPUTS if rounds_to_fp8(group) else UNQUANTIZED
        spec = int4_spec(
            checkpoint, module, group_size=group_size, symmetric=symmetric, activations=activations
        )
        n, groups, zero_name = packed.n, packed.groups, f"{module}.weight_zero_point"
        if not symmetric:
            require_tensor(checkpoint, zero_name, (torch.int32,), (-(-n // CODES_PER_WORD), groups))

        def make(codes: Tensor, scale: Tensor) -> Int4Weight:
            if symmetric:
                zero = torch.full((n, groups), SYMMETRIC_ZERO, dtype=torch.uint8)
            else:
                zero = _unpack_along_n(checkpoint.read(zero_name), n)
            return Int4Weight(spec, codes, scale, zero)

        names = [] if symmetric else [zero_name]
        return packed.stored(spec, make, *names, inputs=spec.dynamic_input)

    def refuses(self, spec: WeightFormat) -> str | None:
        if not isinstance(spec, Int4):
            return f"{self.format} cannot store {spec.label}"
        if not spec.has_integer_zero:
            return (
                f"{METHOD} cannot store fractional zero points; "
                "add `--export torchao`, or use `zero_point: integer`"
            )
        return None

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, Int4Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        if not weight.spec.has_integer_zero or weight.zero_point.is_floating_point():
            raise ValueError(f"{module}: {METHOD} has no place for a fractional zero point")
        symmetric = weight.spec.symmetric
        if symmetric and not bool((weight.zero_point == SYMMETRIC_ZERO).all()):
            raise ValueError(
                f"{module}: written as symmetric, but a zero point differs from {SYMMETRIC_ZERO}"
            )
        tensors = packed_tensors(module, weight, weight.codes, weight.scale)
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = _pack_along_n(weight.zero_point)
        return tensors

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        if not isinstance(spec, Int4):
            raise ValueError(self.refuses(spec))
        return weights_config(BITS, spec.group_size, spec.symmetric)

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any] | None:
        return dict(FP8_PER_TOKEN) if isinstance(spec, Int4) and spec.dynamic_input else None


def _pack_along_n(zero_point: Tensor) -> Tensor:
    """Pack uint8 zero points [N, G] into int32 [ceil(N/8), G], the first of eight rows in the lowest
    nibble."""
    padding = -zero_point.shape[0] % CODES_PER_WORD
    padded = torch.nn.functional.pad(zero_point, (0, 0, 0, padding))
    return words_of(pack_nibbles(padded.T.contiguous())).T.contiguous()


def _unpack_along_n(words: Tensor, n: int) -> Tensor:
    """Unpack int32 [ceil(N/8), G] to uint8 [N, G], as the inverse of `_pack_along_n`."""
    return unpack_nibbles(bytes_of(words.T)).T[:n].contiguous()


SCHEMES.add(Int4.name, PackQuantized())
