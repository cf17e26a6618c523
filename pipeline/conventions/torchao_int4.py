"""torchao's INT4: Int4TilePackedTo4dTensor, written and read, and Int4Tensor, read.

Int4TilePackedTo4dTensor is the only INT4 form that stock torchao both stores and multiplies. That form's
product needs CUDA with compute capability 8.0; its bytes do not.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.int4 import SCALE_BITS, Int4, Int4Weight
from ...layouts.formats.weight_format import Weight, WeightFormat
from ...layouts.packing.int4_affine import scale_and_zero
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight
from .stored import FLOAT_DTYPES, int4_spec, require_tensor
from .torchao_bytes import (
    K_MULTIPLE,
    N_MULTIPLE,
    from_affine,
    pack_tiles,
    pad_to_tiles,
    tiles_shape,
    unpack_tiles,
)
from .torchao_form import FORMS, READERS

GROUP_SIZES = (32, 64, 128, 256)


class TilePackedInt4:
    kind = "Int4TilePackedTo4dTensor"

    def refuses(self, spec: WeightFormat) -> str | None:
        if _int4(spec).dynamic_input is not None:
            return "torchao's INT4 is written with weights alone"
        if _int4(spec).group_size in GROUP_SIZES:
            return None
        return f"torchao takes groups of {', '.join(map(str, GROUP_SIZES))}, not {_int4(spec).group_size}"

    def tensors(self, module: str, weight: Weight) -> dict[str, Tensor]:
        if not isinstance(weight, Int4Weight):
            raise ValueError(f"{module}: {self.kind} holds INT4, not {weight.spec.label}")
        padded = pad_to_tiles(weight)
        return {
            f"{module}._weight_qdata": pack_tiles(padded.codes),
            f"{module}._weight_scale_and_zero": scale_and_zero(padded, torch.bfloat16),
        }

    def described(self, spec: WeightFormat, shape: tuple[int, int]) -> dict[str, Any]:
        return {
            "_data": {"block_size": [1, _int4(spec).group_size], "shape": list(shape)},
            "_tensor_data_names": ["qdata", "scale_and_zero"],
        }

    def config(self, spec: WeightFormat) -> dict[str, Any]:
        data = {
            "group_size": _int4(spec).group_size,
            "set_inductor_config": True,
            "int4_packing_format": "tile_packed_to_4d",
            "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "HQQ"},
            "int4_tile_packed_ntile": 8,
        }
        return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        """Count the bytes: every zero point is stored as a shift, as wide as a scale; the padding of tiles is
        not counted.
        """
        return 4 + 2 * SCALE_BITS / _int4(spec).group_size


def _int4(spec: WeightFormat) -> Int4:
    if not isinstance(spec, Int4):
        raise ValueError(f"torchao's INT4 does not hold {spec.label}")
    return spec


def _block(checkpoint: Checkpoint, module: str, data: Mapping[str, Any]) -> int:
    block = data.get("block_size")
    if not (isinstance(block, list) and len(block) == 2 and block[0] == 1 and isinstance(block[1], int)):
        raise UserError(f"{checkpoint.source}: {module} has block_size {block!r}; Scalegate reads [1, g]")
    return block[1]


def _tile_packed(checkpoint: Checkpoint, module: str, data: Mapping[str, Any]) -> StoredWeight:
    group_size = _block(checkpoint, module, data)
    n, k = _shape(checkpoint, module, data, group_size)
    spec = int4_spec(checkpoint, module, group_size=group_size, zero_point="fractional")
    rows, columns = -(-n // N_MULTIPLE) * N_MULTIPLE, -(-k // K_MULTIPLE) * K_MULTIPLE
    codes, affine = f"{module}._weight_qdata", f"{module}._weight_scale_and_zero"
    require_tensor(checkpoint, codes, (torch.int32,), tiles_shape(rows, columns))
    require_tensor(checkpoint, affine, (torch.bfloat16,), (columns // group_size, rows, 2))

    def read() -> Int4Weight:
        packed = unpack_tiles(checkpoint.read(codes))[:n, : k // 2].contiguous()
        scale, shift = checkpoint.read(affine)[: k // group_size, :n].unbind(-1)
        return from_affine(spec, packed, scale.T, shift.T)

    return StoredWeight(module, (n, k), spec, (codes, affine), read)


def _plain_int4(checkpoint: Checkpoint, module: str, data: Mapping[str, Any]) -> StoredWeight:
    group_size = _block(checkpoint, module, data)
    n, k = _shape(checkpoint, module, data, group_size)
    spec = int4_spec(checkpoint, module, group_size=group_size, zero_point="fractional")
    codes = f"{module}._weight_qdata"
    scale, zero = f"{module}._weight_scale", f"{module}._weight_zero_point"
    require_tensor(checkpoint, codes, (torch.int8, torch.uint8), (n, k // 2))
    for name in (scale, zero):
        require_tensor(checkpoint, name, FLOAT_DTYPES, (k // group_size, n))

    def read() -> Int4Weight:
        # Nibbles are two's complement; flipping their sign bits counts them from 0.
        packed = checkpoint.read(codes).view(torch.uint8) ^ 0x88
        return from_affine(spec, packed, checkpoint.read(scale).T, checkpoint.read(zero).T)

    return StoredWeight(module, (n, k), spec, (codes, scale, zero), read)


def _shape(checkpoint: Checkpoint, module: str, data: Mapping[str, Any], group_size: int) -> tuple[int, int]:
    shape = data.get("shape")
    if not (_is_shape(shape) and group_size > 0 and shape[1] % group_size == 0):
        raise UserError(
            f"{checkpoint.source}: the header gives {module} the shape {shape!r}, which cannot be split "
            f"into groups of {group_size}"
        )
    return shape[0], shape[1]


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)


FORMS.add(Int4.name, TilePackedInt4())
READERS.add(TilePackedInt4.kind, _tile_packed)
READERS.add("Int4Tensor", _plain_int4)
