"""ModelOpt: NVFP4 checkpoints as NVIDIA's Model Optimizer exports them, declared in config.json or beside it.

Read only. `W4A16_NVFP4` and `NVFP4` store the weights alike; `NVFP4` quantizes the activations as well.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...layouts.errors import UserError
from ...layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Input, NVFP4Weight
from ...layouts.outside_files import read_json_object
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config_sections import refuse_malformed_quantization
from .convention import CONVENTIONS, StoredWeight
from .stored import positive_scalar, refuse_shape, require_tensor, scalar_shape
from .targets import matches_wildcard

METHOD = "modelopt"
SIDECAR = "hf_quant_config.json"
WITH_ACTIVATIONS, WEIGHTS_ONLY = "NVFP4", "W4A16_NVFP4"
ALGORITHMS = (WITH_ACTIVATIONS, WEIGHTS_ONLY)
SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_scale_2"


class ModelOpt:
    name = METHOD
    reads = "ModelOpt NVFP4"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        config = checkpoint.quantization_config
        if config is not None:
            return str(config.get("quant_method", "")).startswith(METHOD)
        return (checkpoint.folder / SIDECAR).is_file()

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = _declaration(checkpoint)
        algorithm = config.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise UserError(
                f"{checkpoint.source}: ModelOpt quant_algo {algorithm!r} is not read; "
                f"Scalegate reads {' and '.join(ALGORITHMS)}"
            )
        names = [name for name in checkpoint.tensors if name.endswith(GLOBAL_SCALE)]
        modules = [name.removesuffix(GLOBAL_SCALE) for name in names]
        stored = {module: _stored(checkpoint, module, algorithm == WITH_ACTIVATIONS) for module in modules}
        for name, info in checkpoint.tensors.items():
            packed = name.endswith(".weight") and info.dtype == torch.uint8
            if packed and name.removesuffix(".weight") not in stored:
                require_tensor(checkpoint, name.removesuffix(".weight") + GLOBAL_SCALE, (torch.float32,))
        if not stored:
            raise UserError(
                f"{checkpoint.source}: declared as ModelOpt {algorithm}, but no tensor ends in {GLOBAL_SCALE}"
            )
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        config = _declaration(checkpoint)
        excluded = config.get("ignore") or config.get("exclude_modules") or []
        return not any(matches_wildcard(pattern, module) for pattern in excluded)


def _declaration(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The quantization section, from config.json or from the sidecar that older exports write alone."""
    config = checkpoint.quantization_config
    if config is not None:
        return config
    path = checkpoint.folder / SIDECAR
    section = read_json_object(path).get("quantization")
    if not isinstance(section, dict):
        raise UserError(f"{path} is not a ModelOpt quantization config: it has no object `quantization`")
    refuse_malformed_quantization(section, f"{path}: `quantization`")
    return section


def _stored(checkpoint: Checkpoint, module: str, quantizes_input: bool) -> StoredWeight:
    packed, scale, global_scale = f"{module}.weight", module + SCALE, module + GLOBAL_SCALE
    n, half = require_tensor(checkpoint, packed, (torch.uint8,)).shape
    k = half * 2
    spec = NVFP4()
    refuse_shape(checkpoint, packed, spec, n, k)
    require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), (n, k // GROUP_SIZE))
    require_tensor(checkpoint, global_scale, (torch.float32,))
    scalar_shape(checkpoint, global_scale)
    input_scale = f"{module}.input_scale"
    if quantizes_input:
        require_tensor(checkpoint, input_scale, (torch.float32,))
        scalar_shape(checkpoint, input_scale)
    names = [packed, scale, global_scale]
    names += [input_scale] if input_scale in checkpoint.tensors else []
    shared = (global_scale, input_scale) if quantizes_input else (global_scale,)

    def read() -> NVFP4Weight:
        multiplier = checkpoint.read(global_scale).reshape(())
        return NVFP4Weight(spec, checkpoint.read(packed), checkpoint.read(scale), multiplier)

    def read_input() -> NVFP4Input:
        return NVFP4Input(positive_scalar(checkpoint, input_scale), divides=False)

    inputs = read_input if quantizes_input else None
    return StoredWeight(module, (n, k), spec, tuple(names), read, inputs, shared)


CONVENTION = ModelOpt()
CONVENTIONS.add(METHOD, CONVENTION)
