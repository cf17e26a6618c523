"""FP8 in ModelOpt's form: what its algorithms for eight bits store and declare.

    FP8                        weight E4M3 [N, K], weight_scale fp32 [], input_scale fp32 []
    FP8_PER_CHANNEL_PER_TOKEN  weight E4M3 [N, K], weight_scale fp32 [N]; inputs have a dynamic scale a token
    MXFP8                      weight E4M3 [N, K], weight_scale E8M0 uint8 [N, K/32]; inputs in MXFP8 too

The scales are multipliers. vLLM describes the shapes in `quantization/modelopt.py`; NVIDIA describes the
declaration in Model Optimizer's `torch/export/convert_hf_config.py`.
"""

from typing import Any

from torch import Tensor

from ...layouts.formats.fp8 import FP8, STATIC, TENSOR, FP8Weight
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.mxfp4 import GROUP_SIZE
from ...layouts.formats.mxfp8 import MXFP8, MXFP8Weight
from ...layouts.formats.weight_format import WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight
from .fp8 import INPUT_SCALE, SCALE, WEIGHT, float8_modules, input_scale_of, stored_rows
from .mxfp8_tensors import stored_mxfp8

EIGHT_BITS = {"dynamic": False, "num_bits": 8, "type": "float"}
OF_TENSOR, OF_ROWS, MX = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"
ALGORITHMS = (OF_TENSOR, "FP8_PB_WO", "FP8_PB_REAL", OF_ROWS, MX)
"""ModelOpt's names for FP8 with one scale a tensor, a block or a row, or for every 32."""
SPECS: dict[str, WeightFormat] = {OF_TENSOR: FP8(TENSOR, STATIC), OF_ROWS: FP8(), MX: MXFP8()}
"""The algorithms that round inputs to FP8 too; they are served as FP8, and written."""
GROUPS: dict[str, dict[str, Any]] = {
    OF_TENSOR: {"input_activations": EIGHT_BITS, "weights": EIGHT_BITS},
    OF_ROWS: {
        "input_activations": EIGHT_BITS | {"dynamic": True, "strategy": "token"},
        "weights": EIGHT_BITS | {"strategy": "channel"},
    },
    MX: {
        "input_activations": EIGHT_BITS | {"dynamic": True, "group_size": GROUP_SIZE},
        "weights": EIGHT_BITS | {"group_size": GROUP_SIZE},
    },
}


def algorithm_of(spec: WeightFormat) -> str | None:
    """Return ModelOpt's name for `spec`; None if it has none."""
    return next((name for name, named in SPECS.items() if named == spec), None)


def is_served(checkpoint: Checkpoint, algorithm: str | None) -> bool:
    """Say whether the checkpoint is a release that is served as FP8, and not a source of 16-bit weights."""
    return checkpoint.is_released and algorithm in SPECS


def stored_modules(checkpoint: Checkpoint, algorithm: str) -> dict[str, StoredWeight]:
    modules = float8_modules(checkpoint)
    spec = SPECS.get(algorithm)
    if is_served(checkpoint, algorithm) and isinstance(spec, MXFP8):
        return {module: stored_mxfp8(checkpoint, module) for module in modules}
    if not (is_served(checkpoint, algorithm) and isinstance(spec, FP8)):
        return modules
    return {module: stored_rows(checkpoint, module, spec) for module in modules}


def tensors_of(module: str, weight: FP8Weight | MXFP8Weight, inputs: InputFormat | None) -> dict[str, Tensor]:
    """Return the tensors of `module`, by full name."""
    if isinstance(weight, MXFP8Weight):
        return {module + WEIGHT: weight.codes, module + SCALE: weight.scale}
    scale = weight.scale.float()
    tensors = {module + WEIGHT: weight.codes, module + SCALE: scale.reshape(-1) if scale.dim() else scale}
    if weight.spec.is_static:
        tensors[module + INPUT_SCALE] = input_scale_of(module, inputs)
    return tensors
