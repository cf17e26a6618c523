"""Whether vLLM loads a quantized checkpoint on a CPU, where it has fewer kernels than on GPUs.

The answer follows from headers, by the rules of vLLM 0.32 (`model_executor/kernels/linear/`). Only linear
layers are looked at; for INT4 experts vLLM's kernel needs a CPU with AMX.
"""

from ...layouts.formats.int4 import UNQUANTIZED, Int4
from ...layouts.formats.int8 import Int8
from ...layouts.formats.nvfp4 import NVFP4
from ...layouts.packing.layout import Problem
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.compressed_tensors.scheme import METHOD as COMPRESSED_TENSORS
from ..conventions.modelopt import METHOD as MODELOPT
from ..model_loader.load_model import problems

VLLM_ON_A_CPU = "vLLM on a CPU"
MULTIPLE = 32
"""Of the rows and columns of a merged layer: `CPUWNA16LinearKernel.can_implement`. On GPUs, Marlin pads."""


def why_vllm_fails_on_a_cpu(checkpoint: Checkpoint) -> str | None:
    """Return why vLLM has no kernel for one of its linear layers on a CPU; None if it has one for each of
    them.
    """
    if (checkpoint.quantization_config or {}).get("quant_method") not in (COMPRESSED_TENSORS, MODELOPT):
        return None
    for name, problem in problems(checkpoint).items():
        if problem.experts is None and (reason := _refuses(name, problem)) is not None:
            return reason
    return None


def _refuses(name: str, problem: Problem) -> str | None:
    spec, n, k = problem.spec, problem.n, problem.k
    if isinstance(spec, Int8 | NVFP4) or (isinstance(spec, Int4) and spec.activations != UNQUANTIZED):
        return f"it has no kernel for {spec.label} there"
    if isinstance(spec, Int4) and (n % MULTIPLE or k % MULTIPLE):
        return (
            f"N and K of an INT4 layer have to be multiples of {MULTIPLE} there, and {name} has "
            f"N = {n}, K = {k}"
        )
    return None
