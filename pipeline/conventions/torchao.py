"""torchao: tensor subclasses flattened into safetensors, their attributes as JSON in the file's header.

Read: NVFP4Tensor, Int4TilePackedTo4dTensor, Int4Tensor. Written: Int4TilePackedTo4dTensor, the only INT4 form
stock torchao both stores and multiplies; its product needs CUDA, compute capability 8.0, its bytes do not.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...layouts.errors import UserError
from ...layouts.formats.int4 import SCALE_BITS, Int4, Int4Weight
from ...layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Weight
from ...layouts.formats.weight_format import Weight, WeightFormat
from ...layouts.int4_affine import scale_and_zero
from ...layouts.outside_files import parse_json
from ...layouts.registry import Registry
from ..checkpoints.checkpoint import Checkpoint
from .convention import CONVENTIONS, EXPORTS, StoredWeight
from .stored import FLOAT_DTYPES, int4_spec, refuse_shape, require_tensor, scalar_shape
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

METHOD = "torchao"
TILE_PACKED = "Int4TilePackedTo4dTensor"
GROUP_SIZES = (32, 64, 128, 256)
NAMES_KEY = "tensor_names"
EXPERTS = ".experts."
INSTEAD = "export compressed-tensors"


class TorchAO:
    name = METHOD

    @property
    def reads(self) -> str:
        return f"torchao {', '.join(READERS)}"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") == METHOD

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        stored = {}
        for name, described in _subclasses(checkpoint).items():
            module, _, leaf = name.rpartition(".")
            kind = str(described.get("_type"))
            if kind not in READERS or leaf != "weight":
                raise UserError(
                    f"{checkpoint.source}: {name} is a torchao {kind}; Scalegate reads {self.reads}"
                )
            stored[module] = READERS[kind](checkpoint, module, described.get("_data") or {})
        if not stored:
            raise UserError(
                f"{checkpoint.source}: config.json declares torchao, but no safetensors header describes a "
                f"quantized tensor; save it again with torchao's safetensors support"
            )
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        # The header describes each tensor by name, so there is no rule that could disagree with the files.
        return False

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if not isinstance(spec, Int4):
            return f"torchao's form is written in {Int4.name} only, not in {spec.name}; {INSTEAD}"
        if spec.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"torchao takes groups of {sizes}, not {spec.group_size}; {INSTEAD}"
        if EXPERTS in module:
            return f"torchao's INT4 holds no single experts; {INSTEAD}"
        return f"torchao's INT4 holds no embeddings; {INSTEAD}" if is_embedding else None

    def tensors(self, module: str, weight: Weight) -> dict[str, Tensor]:
        refusal = self.refuses(weight.spec, module)
        if refusal is not None or not isinstance(weight, Int4Weight):
            raise ValueError(f"{module}: {refusal}")
        padded = pad_to_tiles(weight)
        return {
            f"{module}._weight_qdata": pack_tiles(padded.codes),
            f"{module}._weight_scale_and_zero": scale_and_zero(padded, torch.bfloat16),
        }

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        modules: dict[int, list[str]] = {}
        for module, spec in specs.items():
            modules.setdefault(_int4(spec).group_size, []).append(module)
        configs = {size: _int4_config(size) for size in modules}
        if len(configs) == 1:
            (quant_type,) = configs.values()
        else:
            patterns = as_patterns(modules, ignore)
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
        self,
        specs: Mapping[str, WeightFormat],
        shapes: Mapping[str, tuple[int, int]],
        plain: Sequence[str],
    ) -> dict[str, str]:
        # Readers merge the headers of all files and keep the last list of names: every file has to hold all.
        described: dict[str, Any] = {name: {"_type": "Tensor"} for name in plain}
        for module, spec in specs.items():
            described[f"{module}.weight"] = {
                "_type": TILE_PACKED,
                "_data": {"block_size": [1, _int4(spec).group_size], "shape": list(shapes[module])},
                "_tensor_data_names": ["qdata", "scale_and_zero"],
            }
        metadata = {name: json.dumps(value) for name, value in described.items()}
        return {"format": "pt", **metadata, NAMES_KEY: json.dumps(list(described))}

    def sidecars(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        """Every zero point is stored as a shift, as wide as a scale; the padding of tiles is not counted."""
        return 4 + 2 * SCALE_BITS / _int4(spec).group_size


def _int4_config(group_size: int) -> dict[str, Any]:
    data = {
        "group_size": group_size,
        "set_inductor_config": True,
        "int4_packing_format": "tile_packed_to_4d",
        "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "HQQ"},
        "int4_tile_packed_ntile": 8,
    }
    return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}


def _int4(spec: WeightFormat) -> Int4:
    if not isinstance(spec, Int4):
        raise ValueError(f"torchao's form is not written in {spec.label}")
    return spec


def _subclasses(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """What the headers of all files say of each tensor that is not a plain one."""
    described: dict[str, dict[str, Any]] = {}
    for file in checkpoint.shards:
        for name, text in checkpoint.metadata(file).items():
            if name in ("format", NAMES_KEY) or "." not in name:
                continue
            try:
                value = parse_json(text, f"the header's entry for {name}")
            except UserError as error:
                raise UserError(f"{file}: {error.message}; save the checkpoint again") from error
            if isinstance(value, dict) and value.get("_type") != "Tensor":
                if not isinstance(value.get("_data") or {}, dict):
                    raise UserError(f"{file}: the header's entry for {name} is malformed; save it again")
                described[name] = value
    return described


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
            f"{checkpoint.source}: the header gives {module} the shape {shape!r} in groups of {group_size}"
        )
    return shape[0], shape[1]


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)


def _nvfp4(checkpoint: Checkpoint, module: str, data: Mapping[str, Any]) -> StoredWeight:
    codes, scale = f"{module}._weight_qdata", f"{module}._weight_scale"
    global_scale = f"{module}._weight_per_tensor_scale"
    n, half = require_tensor(checkpoint, codes, (torch.uint8,)).shape
    k = half * 2
    spec = NVFP4()
    refuse_shape(checkpoint, codes, spec, n, k)
    if data.get("block_size") != GROUP_SIZE:
        raise UserError(
            f"{checkpoint.source}: {module} has block_size {data.get('block_size')!r}; NVFP4 has {GROUP_SIZE}"
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
    shared = (global_scale,) if has_global else ()

    def read() -> NVFP4Weight:
        scales = checkpoint.read(scale)
        multiplier = checkpoint.read(global_scale).reshape(()) if has_global else torch.tensor(1.0)
        rows = unswizzle(scales, n, k // GROUP_SIZE) if swizzled else scales
        return NVFP4Weight(spec, checkpoint.read(codes), rows, multiplier)

    names = (codes, scale, *shared)
    return StoredWeight(module, (n, k), spec, names, read, shared=shared)


Reader = Callable[[Checkpoint, str, Mapping[str, Any]], StoredWeight]
READERS: Registry[Reader] = Registry("torchao tensor class")
"""By the name of the tensor class, what reads one of its weights from the header's entry."""
READERS.add("NVFP4Tensor", _nvfp4)
READERS.add(TILE_PACKED, _tile_packed)
READERS.add("Int4Tensor", _plain_int4)

CONVENTION = TorchAO()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
