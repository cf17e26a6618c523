"""compressed-tensors: INT4 `pack-quantized` read and written, NVFP4 `nvfp4-pack-quantized` read.

NVFP4 with its activations in NVFP4 or left alone; nothing else about activations is read.

The convention of vLLM, SGLang, llm-compressor and transformers. Their library is not used: the bytes are
written and read here, and `tests/bench/interchange.py` compares with it in an environment of its own.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layouts.errors import UserError
from ...layouts.int4 import Int4Weight, pack_nibbles, unpack_nibbles
from ...layouts.nvfp4 import GROUP_SIZE, NVFP4Input, NVFP4Weight
from .convention import CONVENTIONS, EXPORTS, StoredWeight
from .stored import FLOAT_DTYPES, positive_scalar, require_tensor, scalar_shape
from .targets import LINEAR, as_patterns, first_match, matches

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint

METHOD = "compressed-tensors"
INT4_FORMAT = "pack-quantized"
NVFP4_FORMAT = "nvfp4-pack-quantized"
PACKED = ".weight_packed"
SYMMETRIC_ZERO = 8
"""Codes are stored unsigned: the symmetric range -8..7 is 0..15 with its zero at 8."""
CODES_PER_WORD = 8
READS = f"{METHOD} INT4 weight-only {INT4_FORMAT} and NVFP4 {NVFP4_FORMAT}"


class CompressedTensors:
    name = METHOD

    def recognizes(self, checkpoint: "Checkpoint") -> bool:
        config = checkpoint.quantization_config or {}
        return config.get("quant_method") == METHOD

    def modules(self, checkpoint: "Checkpoint") -> dict[str, StoredWeight]:
        config = checkpoint.quantization_config or {}
        _refuse_sparsity(checkpoint.source, config)
        groups = config.get("config_groups") or {}
        targets = {target: group for group in groups.values() for target in group.get("targets", [])}
        ignore = config.get("ignore") or []
        stored = {}
        for name in checkpoint.tensors:
            if not name.endswith(PACKED):
                continue
            module = name.removesuffix(PACKED)
            target = first_match(targets, module)
            if target is None or any(matches(pattern, module) for pattern in ignore):
                raise UserError(
                    f"{checkpoint.source}: tensor {name} is packed, but no config group of the quantization "
                    f"config targets {module} or its ignore list excludes it"
                )
            stored[module] = _stored_weight(checkpoint, module, targets[target], config)
        if not stored and (groups or config.get("kv_cache_scheme") is None):
            raise UserError(
                f"{checkpoint.source}: config.json declares {METHOD}, but no tensor ends in {PACKED}: "
                f"the weights are not compressed (quantization_status {config.get('quantization_status')!r})"
            )
        return stored

    def claims(self, checkpoint: "Checkpoint", module: str) -> bool:
        config = checkpoint.quantization_config or {}
        groups = config.get("config_groups") or {}
        targets = [target for group in groups.values() for target in group.get("targets", [])]
        ignored = any(matches(pattern, module) for pattern in config.get("ignore") or [])
        return not ignored and first_match(targets, module) is not None

    def tensors(self, module: str, weight: Int4Weight, symmetric: bool) -> dict[str, Tensor]:
        n, k = weight.shape
        if not weight.has_integer_zero:
            raise ValueError(f"{module}: {METHOD} has no place for a fractional zero point")
        if symmetric and not bool((weight.zero_point == SYMMETRIC_ZERO).all()):
            raise ValueError(
                f"{module}: written as symmetric, but a zero point differs from {SYMMETRIC_ZERO}"
            )
        tensors = {
            f"{module}{PACKED}": _words(weight.codes),
            f"{module}.weight_scale": weight.scale.contiguous(),
            f"{module}.weight_shape": torch.tensor([n, k], dtype=torch.int64),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = _pack_along_n(weight.zero_point)
        return tensors

    def quantization_config(
        self,
        modules: Mapping[str, int],
        symmetric: bool,
        ignore: Sequence[str],
        embeddings: Sequence[str] = (),
    ) -> dict[str, Any]:
        by_group_size: dict[str, list[str]] = {}
        for module, group_size in modules.items():
            by_group_size.setdefault(str(group_size), []).append(module)
        if len(by_group_size) == 1:
            targets = {group_size: [LINEAR] for group_size in by_group_size}
        else:
            targets = as_patterns(by_group_size, ignore)
        for module in embeddings:
            # `Linear` does not name them: a reader that cannot do it has to fail, not to skip them.
            group = targets[str(modules[module])]
            targets[str(modules[module])] = [*group, *([] if module in group else [module])]
        return {
            "quant_method": METHOD,
            "format": INT4_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": _group(targets[group_size], int(group_size), symmetric)
                for index, group_size in enumerate(targets)
            },
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }

    def file_metadata(
        self, modules: Mapping[str, int], shapes: Mapping[str, tuple[int, int]], plain: Sequence[str]
    ) -> dict[str, str]:
        return {"format": "pt"}


def _group(targets: list[str], group_size: int, symmetric: bool) -> dict[str, Any]:
    per_channel = group_size == -1
    return {
        "targets": targets,
        "weights": {
            "num_bits": 4,
            "type": "int",
            "strategy": "channel" if per_channel else "group",
            "group_size": None if per_channel else group_size,
            "symmetric": symmetric,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": INT4_FORMAT,
    }


def _refuse_sparsity(source: str, config: Mapping[str, Any]) -> None:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UserError(f"{source}: sparse checkpoints are not read (sparsity format {sparsity!r})")
    if config.get("transform_config"):
        raise UserError(f"{source}: checkpoints with a transform_config (rotations at run time) are not read")


def _stored_weight(
    checkpoint: "Checkpoint", module: str, group: Mapping[str, Any], config: Mapping[str, Any]
) -> StoredWeight:
    weights = group.get("weights") or {}
    bits, kind = weights.get("num_bits"), weights.get("type")
    layout = group.get("format") or config.get("format")
    activations = group.get("input_activations")
    if (bits, kind, layout) == (4, "int", INT4_FORMAT) and activations is None:
        return _stored_int4(checkpoint, module, weights)
    if (bits, kind, layout) == (4, "float", NVFP4_FORMAT) and (activations is None or _is_nvfp4(activations)):
        return _stored_nvfp4(checkpoint, module, activations is not None)
    activation_text = "" if activations is None else (
        f", activations {activations.get('num_bits')}-bit {activations.get('type')} "
        f"({activations.get('strategy')}, dynamic: {activations.get('dynamic')})"
    )  # fmt: skip
    raise UserError(
        f"{checkpoint.source}: {module} is stored as {layout!r}, {bits}-bit {kind} weights{activation_text}; "
        f"Scalegate reads {READS}"
    )


def _is_nvfp4(activations: Mapping[str, Any]) -> bool:
    """Whether they have an E4M3 scale per 16 found as they come, and one fp32 scale found beforehand."""
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
    return activations.get("group_size") == GROUP_SIZE and wanted.items() <= activations.items()


def _stored_int4(checkpoint: "Checkpoint", module: str, weights: Mapping[str, Any]) -> StoredWeight:
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
    groups = k // group_size
    require_tensor(checkpoint, f"{module}.weight_scale", FLOAT_DTYPES, (n, groups))
    names = [name, f"{module}.weight_scale"]
    if f"{module}.weight_shape" in checkpoint.tensors:
        require_tensor(checkpoint, f"{module}.weight_shape", (torch.int64, torch.int32), (2,))
        names.append(f"{module}.weight_shape")
    symmetric = bool(weights.get("symmetric", True))
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
        return Int4Weight(_bytes(checkpoint.read(name)), scale, zero, group_size)

    return StoredWeight(module, (n, k), Int4Weight, group_size, True, tuple(names), read)


def _stored_nvfp4(checkpoint: "Checkpoint", module: str, quantizes_input: bool) -> StoredWeight:
    packed, scale = module + PACKED, f"{module}.weight_scale"
    global_scale = f"{module}.weight_global_scale"
    n, half = require_tensor(checkpoint, packed, (torch.uint8,)).shape
    k = half * 2
    if k % GROUP_SIZE:
        raise UserError(f"{checkpoint.source}: {packed} has K = {k}, which {GROUP_SIZE} does not divide")
    require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), (n, k // GROUP_SIZE))
    require_tensor(checkpoint, global_scale, (torch.float32,))
    scalar_shape(checkpoint, global_scale)
    input_scale = f"{module}.input_global_scale"
    if quantizes_input:
        require_tensor(checkpoint, input_scale, (torch.float32,))
        scalar_shape(checkpoint, input_scale)
    names = [packed, scale, global_scale]
    names += [input_scale] if input_scale in checkpoint.tensors else []

    # Both global scales are stored as divisors.
    def read() -> NVFP4Weight:
        multiplier = positive_scalar(checkpoint, global_scale).reciprocal()
        return NVFP4Weight(checkpoint.read(packed), checkpoint.read(scale), multiplier)

    def read_input() -> NVFP4Input:
        return NVFP4Input(positive_scalar(checkpoint, input_scale), divides=True)

    inputs = read_input if quantizes_input else None
    return StoredWeight(module, (n, k), NVFP4Weight, GROUP_SIZE, True, tuple(names), read, inputs)


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


CONVENTION = CompressedTensors()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
