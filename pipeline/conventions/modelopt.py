"""ModelOpt: NVFP4 and FP8 checkpoints as NVIDIA's Model Optimizer exports them, declared in config.json and
in a second file.

`W4A16_NVFP4` and `NVFP4` store the weights in the same way; `NVFP4` quantizes activations as well.
`modelopt_fp8.py` has the algorithms for FP8.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...base.untrusted_files import read_json_object
from ...layouts.formats.fp8 import FP8Weight
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.mxfp8 import MXFP8Weight
from ...layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Weight
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config_sections import refuse_malformed_quantization
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from .modelopt_fp8 import ALGORITHMS as FP8_ALGORITHMS
from .modelopt_fp8 import GROUP_SIZE as MX_GROUP_SIZE
from .modelopt_fp8 import GROUPS as FP8_GROUPS
from .modelopt_fp8 import MX, algorithm_of, is_served, stored_modules, tensors_of
from .nvfp4_tensors import NVFP4Tensors
from .stored import require_tensor
from .targets import LINEAR, matches_wildcard

METHOD = "modelopt"
SIDECAR = "hf_quant_config.json"
PRODUCER = {"name": METHOD, "version": "0.47.0"}
"""The producer entry: readers look for ModelOpt's name and compare its version."""
INSTEAD = "export compressed-tensors"
WITH_ACTIVATIONS, WEIGHTS_ONLY = "NVFP4", "W4A16_NVFP4"
ALGORITHMS = (WITH_ACTIVATIONS, WEIGHTS_ONLY)
FOUR_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
GROUPS = FP8_GROUPS | {
    WITH_ACTIVATIONS: {"input_activations": FOUR_BITS, "weights": FOUR_BITS},
    WEIGHTS_ONLY: {"weights": FOUR_BITS},
}
"""The config group of each algorithm that is written."""
GROUP_SIZES = dict.fromkeys(ALGORITHMS, GROUP_SIZE) | {MX: MX_GROUP_SIZE}
KV_ALGORITHMS = {"fp8": "FP8", "nvfp4": "NVFP4"}
"""ModelOpt's names for our KV formats."""
KV_BITS = {"fp8": 8, "nvfp4": 4}
SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_scale_2"
TENSORS = NVFP4Tensors(".weight", SCALE, GLOBAL_SCALE, ".input_scale", divides=False)


class ModelOpt(ExportDefaults):
    name = METHOD
    reads = "ModelOpt NVFP4 and FP8"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        config = checkpoint.quantization_config
        if config is not None:
            return str(config.get("quant_method", "")).startswith(METHOD)
        return (checkpoint.folder / SIDECAR).is_file()

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = _declaration(checkpoint)
        algorithm = config.get("quant_algo")
        if algorithm is None and stored_kv_cache(config) is not None:
            return {}
        if algorithm in FP8_ALGORITHMS:
            return stored_modules(checkpoint, algorithm)
        if algorithm not in ALGORITHMS:
            raise UserError(
                f"{checkpoint.source}: ModelOpt quant_algo {algorithm!r} is not read; "
                f"Scalegate reads {', '.join((*ALGORITHMS, *FP8_ALGORITHMS))}"
            )
        names = [name for name in checkpoint.tensors if name.endswith(GLOBAL_SCALE)]
        modules = [name.removesuffix(GLOBAL_SCALE) for name in names]
        stored = {
            module: TENSORS.stored(checkpoint, module, algorithm == WITH_ACTIVATIONS) for module in modules
        }
        for name, info in checkpoint.tensors.items():
            packed = name.endswith(".weight") and info.dtype == torch.uint8
            if packed and name.removesuffix(".weight") not in stored:
                require_tensor(checkpoint, name.removesuffix(".weight") + GLOBAL_SCALE, (torch.float32,))
        if not stored:
            raise UserError(
                f"{checkpoint.source}: the config declares ModelOpt {algorithm}, but no tensor ends in "
                f"{GLOBAL_SCALE}"
            )
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        algorithm = _declaration(checkpoint).get("quant_algo")
        is_read = algorithm in ALGORITHMS or is_served(checkpoint, algorithm)
        return is_read and self.excludes(checkpoint, module) is None

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        patterns = _excluded(_declaration(checkpoint))
        return next((pattern for pattern in patterns if matches_wildcard(pattern, module)), None)

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if not isinstance(spec, NVFP4) and algorithm_of(spec) is None:
            return f"ModelOpt has no form for {spec.label}; {INSTEAD}"
        return f"ModelOpt's form holds no embeddings; {INSTEAD}" if is_embedding else None

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if isinstance(weight, FP8Weight | MXFP8Weight):
            return tensors_of(module, weight, inputs)
        if not isinstance(weight, NVFP4Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec, module)}")
        return TENSORS.written(module, weight, inputs)

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        algorithms = list(dict.fromkeys(map(_algorithm, specs.values())))
        if len(algorithms) > 1:
            raise UserError(
                "a ModelOpt checkpoint has one algorithm for all layers, but this recipe needs "
                f"{' and '.join(algorithms)}; {INSTEAD}"
            )
        if not algorithms:
            # Keys and values alone: `kv_cache` says how.
            return {"ignore": [], "quant_algo": None, "producer": PRODUCER, "quant_method": METHOD}
        return {
            "config_groups": {"group_0": GROUPS[algorithms[0]] | {"targets": [LINEAR]}},
            "ignore": list(ignore),
            "quant_algo": algorithms[0],
            "producer": PRODUCER,
            "quant_method": METHOD,
        }

    def sidecars(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the older sidecar file, which TensorRT-LLM and ModelOpt's own tools read."""
        section = {
            "quant_algo": config["quant_algo"],
            "kv_cache_quant_algo": KV_ALGORITHMS.get(stored_kv_cache(config) or ""),
            "group_size": GROUP_SIZES.get(config["quant_algo"]),
            "exclude_modules": config["ignore"],
        }
        return {SIDECAR: {"producer": config["producer"], "quantization": section}}

    def kv_cache(self, kv_format: str) -> dict[str, Any] | None:
        """Return the declarations of a KV format: a scheme for `config.json`, the algorithm's name for the
        older sidecar."""
        if kv_format not in KV_BITS:
            return None
        return {"kv_cache_scheme": {"dynamic": False, "num_bits": KV_BITS[kv_format], "type": "float"}}

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def stored_kv_cache(config: Mapping[str, Any]) -> str | None:
    """Return the KV format that a ModelOpt section declares, `config.json`'s or the sidecar's; None without
    one.
    """
    scheme = config.get("kv_cache_scheme") or {}
    algorithm = config.get("kv_cache_quant_algo")
    for name, bits in KV_BITS.items():
        is_scheme = scheme.get("num_bits") == bits and scheme.get("type") == "float"
        if algorithm == KV_ALGORITHMS[name] or (is_scheme and not scheme.get("dynamic")):
            return name
    return None


def _algorithm(spec: WeightFormat) -> str:
    if isinstance(spec, NVFP4):
        return WITH_ACTIVATIONS if spec.activations else WEIGHTS_ONLY
    named = algorithm_of(spec)
    if named is None:
        raise ValueError(f"ModelOpt has no algorithm for {spec.label}")
    return named


def _excluded(config: Mapping[str, Any]) -> list[str]:
    """Return patterns of the modules that are not quantized, under either of ModelOpt's names for the key."""
    return config.get("ignore") or config.get("exclude_modules") or []


def _declaration(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the quantization section, from config.json or from the sidecar that older exports write
    alone.
    """
    config = checkpoint.quantization_config
    if config is not None:
        return config
    path = checkpoint.folder / SIDECAR
    section = read_json_object(path).get("quantization")
    if not isinstance(section, dict):
        raise UserError(f"{path} is not a ModelOpt quantization config: it has no object `quantization`")
    refuse_malformed_quantization(section, f"{path}: `quantization`")
    return section


CONVENTION = ModelOpt()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
