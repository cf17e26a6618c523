"""torchao: tensor subclasses flattened into safetensors, their attributes as JSON in the file's header.

Read: NVFP4Tensor, Int4TilePackedTo4dTensor, Int4Tensor. Written: Int4TilePackedTo4dTensor, the only INT4 form
stock torchao both stores and multiplies; its product needs CUDA, compute capability 8.0, its bytes do not.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layouts.errors import UserError
from ...layouts.int4 import Int4Weight
from ...layouts.int4_affine import scale_and_zero
from ...layouts.nvfp4 import GROUP_SIZE, NVFP4Weight
from .convention import CONVENTIONS, EXPORTS, StoredWeight
from .stored import FLOAT_DTYPES, require_tensor, scalar_shape
from .targets import as_patterns
from .torchao_bytes import (
    K_MULTIPLE,
    N_MULTIPLE,
    from_affine,
    pack_tiles,
    pad_to_tiles,
    swizzled_shape,
    tiles_shape,
    unpack_tiles,
    unswizzle,
)

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint

METHOD = "torchao"
READS = "torchao NVFP4Tensor, Int4TilePackedTo4dTensor and Int4Tensor"
TILE_PACKED = "Int4TilePackedTo4dTensor"
GROUP_SIZES = (32, 64, 128, 256)
NAMES_KEY = "tensor_names"
EXPERTS = ".experts."


class TorchAO:
    name = METHOD

    def recognizes(self, checkpoint: "Checkpoint") -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") == METHOD

    def modules(self, checkpoint: "Checkpoint") -> dict[str, StoredWeight]:
        stored = {}
        for name, described in _subclasses(checkpoint).items():
            module, _, leaf = name.rpartition(".")
            kind = described.get("_type")
            if kind not in READERS or leaf != "weight":
                raise UserError(f"{checkpoint.source}: {name} is a torchao {kind}; Scalegate reads {READS}")
            stored[module] = READERS[kind](checkpoint, module, described.get("_data") or {})
        if not stored:
            raise UserError(
                f"{checkpoint.source}: config.json declares torchao, but no safetensors header describes a "
                f"quantized tensor; save it again with torchao's safetensors support"
            )
        return stored

    def claims(self, checkpoint: "Checkpoint", module: str) -> bool:
        # The header describes each tensor by name, so there is no rule that could disagree with the files.
        return False

    def tensors(self, module: str, weight: Int4Weight, symmetric: bool) -> dict[str, Tensor]:
        _refuse(module, weight.group_size)
        padded = pad_to_tiles(weight)
        return {
            f"{module}._weight_qdata": pack_tiles(padded.codes),
            f"{module}._weight_scale_and_zero": scale_and_zero(padded, torch.bfloat16),
        }

    def quantization_config(
        self,
        modules: Mapping[str, int],
        symmetric: bool,
        ignore: Sequence[str],
        embeddings: Sequence[str] = (),
    ) -> dict[str, Any]:
        if embeddings:
            raise UserError(f"{embeddings[0]}: torchao's INT4 holds no embeddings; export compressed-tensors")
        by_group_size: dict[str, list[str]] = {}
        for module, group_size in modules.items():
            _refuse(module, group_size)
            by_group_size.setdefault(str(group_size), []).append(module)
        configs = {size: _int4_config(int(size)) for size in by_group_size}
        if len(configs) == 1:
            (quant_type,) = configs.values()
        else:
            patterns = as_patterns(by_group_size, ignore)
            by_name = {pattern: configs[size] for size in configs for pattern in patterns[size]}
            data = {"fqn_to_config": by_name, "module_fqn_to_config": by_name}
            quant_type = {"_type": "FqnToConfig", "_version": 1, "_data": data}
        return {
            "quant_method": METHOD,
            "quant_type": {"default": quant_type},
            "modules_to_not_convert": list(ignore),
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def file_metadata(
        self, modules: Mapping[str, int], shapes: Mapping[str, tuple[int, int]], plain: Sequence[str]
    ) -> dict[str, str]:
        # Readers merge the headers of all files and keep the last list of names: every file has to hold all.
        described: dict[str, Any] = {name: {"_type": "Tensor"} for name in plain}
        for module, group_size in modules.items():
            described[f"{module}.weight"] = {
                "_type": TILE_PACKED,
                "_data": {"block_size": [1, group_size], "shape": list(shapes[module])},
                "_tensor_data_names": ["qdata", "scale_and_zero"],
            }
        metadata = {name: json.dumps(value) for name, value in described.items()}
        return {"format": "pt", **metadata, NAMES_KEY: json.dumps(list(described))}


def _int4_config(group_size: int) -> dict[str, Any]:
    data = {
        "group_size": group_size,
        "set_inductor_config": True,
        "int4_packing_format": "tile_packed_to_4d",
        "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "HQQ"},
        "int4_tile_packed_ntile": 8,
    }
    return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}


def _refuse(module: str, group_size: int) -> None:
    """Refuse what torchao's INT4 form cannot hold."""
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise UserError(
            f"{module}: torchao takes groups of {sizes}, not {group_size}; export compressed-tensors"
        )
    if EXPERTS in module:
        raise UserError(f"{module}: torchao's INT4 holds no single experts; export compressed-tensors")


def _subclasses(checkpoint: "Checkpoint") -> dict[str, dict[str, Any]]:
    """What the headers of all files say of each tensor that is not a plain one."""
    described: dict[str, dict[str, Any]] = {}
    for file in checkpoint.shards:
        for name, text in checkpoint.metadata(file).items():
            if name in ("format", NAMES_KEY) or "." not in name:
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{file}: the header's entry for {name} is not JSON ({error})") from error
            if isinstance(value, dict) and value.get("_type") != "Tensor":
                described[name] = value
    return described


def _block(checkpoint: "Checkpoint", module: str, data: Mapping[str, Any]) -> int:
    block = data.get("block_size")
    if not (isinstance(block, list) and len(block) == 2 and block[0] == 1 and isinstance(block[1], int)):
        raise UserError(f"{checkpoint.source}: {module} has block_size {block!r}; Scalegate reads [1, g]")
    return block[1]


def _tile_packed(checkpoint: "Checkpoint", module: str, data: Mapping[str, Any]) -> StoredWeight:
    group_size = _block(checkpoint, module, data)
    n, k = _shape(checkpoint, module, data, group_size)
    rows, columns = -(-n // N_MULTIPLE) * N_MULTIPLE, -(-k // K_MULTIPLE) * K_MULTIPLE
    codes, affine = f"{module}._weight_qdata", f"{module}._weight_scale_and_zero"
    require_tensor(checkpoint, codes, (torch.int32,), tiles_shape(rows, columns))
    require_tensor(checkpoint, affine, (torch.bfloat16,), (columns // group_size, rows, 2))

    def read() -> Int4Weight:
        packed = unpack_tiles(checkpoint.read(codes))[:n, : k // 2].contiguous()
        scale, shift = checkpoint.read(affine)[: k // group_size, :n].unbind(-1)
        return from_affine(packed, scale.T, shift.T, group_size)

    return StoredWeight(module, (n, k), Int4Weight, group_size, False, (codes, affine), read)


def _plain_int4(checkpoint: "Checkpoint", module: str, data: Mapping[str, Any]) -> StoredWeight:
    group_size = _block(checkpoint, module, data)
    n, k = _shape(checkpoint, module, data, group_size)
    codes = f"{module}._weight_qdata"
    scale, zero = f"{module}._weight_scale", f"{module}._weight_zero_point"
    require_tensor(checkpoint, codes, (torch.int8, torch.uint8), (n, k // 2))
    for name in (scale, zero):
        require_tensor(checkpoint, name, FLOAT_DTYPES, (k // group_size, n))

    def read() -> Int4Weight:
        # Nibbles are two's complement; flipping their sign bits counts them from 0.
        packed = checkpoint.read(codes).view(torch.uint8) ^ 0x88
        return from_affine(packed, checkpoint.read(scale).T, checkpoint.read(zero).T, group_size)

    return StoredWeight(module, (n, k), Int4Weight, group_size, False, (codes, scale, zero), read)


def _shape(
    checkpoint: "Checkpoint", module: str, data: Mapping[str, Any], group_size: int
) -> tuple[int, int]:
    shape = data.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and group_size > 0 and shape[1] % group_size == 0):
        raise UserError(
            f"{checkpoint.source}: the header gives {module} the shape {shape!r} in groups of {group_size}"
        )
    return shape[0], shape[1]


def _nvfp4(checkpoint: "Checkpoint", module: str, data: Mapping[str, Any]) -> StoredWeight:
    codes, scale = f"{module}._weight_qdata", f"{module}._weight_scale"
    global_scale = f"{module}._weight_per_tensor_scale"
    n, half = require_tensor(checkpoint, codes, (torch.uint8,)).shape
    k = half * 2
    if data.get("block_size") != GROUP_SIZE or k % GROUP_SIZE:
        raise UserError(
            f"{checkpoint.source}: {module} has K = {k} and block_size {data.get('block_size')!r}; "
            f"NVFP4 has {GROUP_SIZE}"
        )
    if data.get("act_quant_kwargs") is not None:
        raise UserError(
            f"{checkpoint.source}: {module} quantizes its activations as well (act_quant_kwargs); "
            f"of torchao's NVFP4, Scalegate reads what NVFP4WeightOnlyConfig makes"
        )
    swizzled = bool(data.get("is_swizzled_scales"))
    expected = swizzled_shape(n, k) if swizzled else (n, k // GROUP_SIZE)
    require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), expected)
    has_global = global_scale in checkpoint.tensors
    if has_global:
        require_tensor(checkpoint, global_scale, (torch.float32,))
        scalar_shape(checkpoint, global_scale)
    optional = [global_scale] if has_global else []

    def read() -> NVFP4Weight:
        scales = checkpoint.read(scale)
        multiplier = checkpoint.read(global_scale).reshape(()) if has_global else torch.tensor(1.0)
        rows = unswizzle(scales, n, k // GROUP_SIZE) if swizzled else scales
        return NVFP4Weight(checkpoint.read(codes), rows, multiplier)

    return StoredWeight(module, (n, k), NVFP4Weight, GROUP_SIZE, True, (codes, scale, *optional), read)


Reader = Callable[["Checkpoint", str, Mapping[str, Any]], StoredWeight]
READERS: dict[str, Reader] = {TILE_PACKED: _tile_packed, "Int4Tensor": _plain_int4, "NVFP4Tensor": _nvfp4}

CONVENTION = TorchAO()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
