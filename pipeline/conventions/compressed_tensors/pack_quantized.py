"""INT4 in compressed-tensors, `pack-quantized`: eight codes to an int32, least significant first.

Weights [N, K] as `weight_packed` int32 [N, K/8], `weight_scale` [N, K/g] and, where the config group is not
symmetric, `weight_zero_point` int32 [N/8, K/g], packed along N. Weight-only: groups and whole rows.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....layouts.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.int4 import SYMMETRIC_ZERO, Int4, Int4Weight, pack_nibbles, unpack_nibbles
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import FLOAT_DTYPES, int4_spec, require_tensor
from .scheme import METHOD, SCHEMES

PACKED = ".weight_packed"
CODES_PER_WORD = 8


class PackQuantized:
    format = "pack-quantized"
    reads = "INT4 weight-only pack-quantized"
    suffix = PACKED
    dtypes = None

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights = group.get("weights") or {}
        kind = weights.get("num_bits"), weights.get("type"), group["format"]
        return kind == (4, "int", self.format) and group.get("input_activations") is None

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        return _stored(checkpoint, module, group["weights"])

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
        tensors = {
            f"{module}{PACKED}": _words(weight.codes),
            f"{module}.weight_scale": weight.scale.contiguous(),
            f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = _pack_along_n(weight.zero_point)
        return tensors

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        if not isinstance(spec, Int4):
            raise ValueError(self.refuses(spec))
        return {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": spec.group_size,
            "symmetric": spec.symmetric,
            "dynamic": False,
        }

    def inputs_config(self, spec: WeightFormat) -> None:
        return None


def _stored(checkpoint: Checkpoint, module: str, weights: Mapping[str, Any]) -> StoredWeight:
    name = module + PACKED
    n, words = require_tensor(checkpoint, name, (torch.int32,)).shape
    if f"{module}.weight_g_idx" in checkpoint.tensors:
        raise UserError(
            f"{checkpoint.source}: {module} was quantized with activation ordering (weight_g_idx), "
            f"whose groups are not consecutive; quantize it with actorder=None or 'static'"
        )
    k = words * CODES_PER_WORD
    strategy = weights.get("strategy")
    group_size = k if strategy == "channel" else weights.get("group_size")
    if strategy not in ("group", "channel") or not isinstance(group_size, int) or group_size <= 0:
        raise UserError(
            f"{checkpoint.source}: {module} has strategy {strategy!r} with group_size {group_size!r}; "
            f"Scalegate reads 'group' and 'channel'"
        )
    if k % group_size:
        raise UserError(
            f"{checkpoint.source}: {name} has K = {k}, which group_size {group_size} does not divide"
        )
    symmetric = bool(weights.get("symmetric", True))
    spec = int4_spec(checkpoint, module, group_size=group_size, symmetric=symmetric)
    groups = spec.groups(k)
    require_tensor(checkpoint, f"{module}.weight_scale", FLOAT_DTYPES, (n, groups))
    names = [name, f"{module}.weight_scale"]
    if f"{module}.weight_shape" in checkpoint.tensors:
        require_tensor(checkpoint, f"{module}.weight_shape", (torch.int64, torch.int32), (2,))
        names.append(f"{module}.weight_shape")
    zero_name = f"{module}.weight_zero_point"
    if not symmetric:
        packed_rows = -(-n // CODES_PER_WORD)
        require_tensor(checkpoint, zero_name, (torch.int32,), (packed_rows, groups))
        names.append(zero_name)
    elif zero_name in checkpoint.tensors:
        raise UserError(f"{checkpoint.source}: the config says {module} is symmetric, but it has {zero_name}")

    def read() -> Int4Weight:
        if f"{module}.weight_shape" in names:
            shape = checkpoint.read(f"{module}.weight_shape").tolist()
            if shape != [n, k]:
                raise UserError(
                    f"{checkpoint.source}: {module}.weight_shape says {shape}, {name} holds {[n, k]}"
                )
        scale = checkpoint.read(f"{module}.weight_scale")
        if symmetric:
            zero = torch.full((n, groups), SYMMETRIC_ZERO, dtype=torch.uint8)
        else:
            zero = _unpack_along_n(checkpoint.read(zero_name), n)
        return Int4Weight(spec, _bytes(checkpoint.read(name)), scale, zero)

    return StoredWeight(module, (n, k), spec, tuple(names), read)


def _words(codes: Tensor) -> Tensor:
    """uint8 [N, K/2], two codes a byte, to int32 [N, K/8]: the same bytes on a little-endian machine."""
    _require_little_endian()
    # Flat, because a dimension of size 1 may carry a stride that a wider dtype refuses.
    return codes.reshape(-1).view(torch.int32).view(*codes.shape[:-1], -1)


def _bytes(words: Tensor) -> Tensor:
    """int32 [N, K/8] to uint8 [N, K/2]; undoes `_words`."""
    _require_little_endian()
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)


def _pack_along_n(zero_point: Tensor) -> Tensor:
    """uint8 zero points [N, G] to int32 [ceil(N/8), G], the first of eight rows in the lowest nibble."""
    padding = -zero_point.shape[0] % CODES_PER_WORD
    padded = torch.nn.functional.pad(zero_point, (0, 0, 0, padding))
    return _words(pack_nibbles(padded.T.contiguous())).T.contiguous()


def _unpack_along_n(words: Tensor, n: int) -> Tensor:
    """int32 [ceil(N/8), G] to uint8 [N, G]; undoes `_pack_along_n`."""
    return unpack_nibbles(_bytes(words.T)).T[:n].contiguous()


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("packed checkpoints are little-endian; this machine is not")


SCHEMES.add(Int4.name, PackQuantized())
