"""Whether vLLM has kernels for a quantized checkpoint, on a CPU and on an NVIDIA GPU.

The answer follows from headers, by the rules of vLLM 0.32 (`model_executor/kernels/linear/`). Only linear
layers are looked at; for INT4 experts vLLM's kernel needs a CPU with AMX.
"""

import torch

from ...layouts.formats.int4 import UNQUANTIZED, Int4
from ...layouts.formats.int8 import Int8
from ...layouts.formats.mxfp4 import MXFP4
from ...layouts.formats.mxfp8 import MXFP8
from ...layouts.formats.nvfp4 import NVFP4
from ...layouts.packing.layout import Problem
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..conventions.compressed_tensors.scheme import METHOD as COMPRESSED_TENSORS
from ..conventions.modelopt import METHOD as MODELOPT
from ..model_loader.load_model import problems

VLLM_ON_A_CPU, VLLM_ON_A_GPU = "vLLM on a CPU", "vLLM on an NVIDIA GPU"
MULTIPLE = 32
"""Of the rows and columns of a merged layer: `CPUWNA16LinearKernel.can_implement`. On GPUs, Marlin pads."""
LEAST_GROUP = 32
"""On GPUs: `MARLIN_SUPPORTED_GROUP_SIZES`; Machete and the Triton kernel take no smaller ones either.
Exllama does, of float16 without zero points."""


def unread_by_vllm(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the devices on which vLLM has no kernel for one of the linear layers, each with the reason."""
    if (checkpoint.quantization_config or {}).get("quant_method") not in (COMPRESSED_TENSORS, MODELOPT):
        return {}
    unread: dict[str, str] = {}
    for name, problem in problems(checkpoint).items():
        if problem.experts is not None:
            continue
        on_a_gpu = _refuses_on_a_gpu(name, problem, default_dtype(checkpoint))
        for device, reason in ((VLLM_ON_A_CPU, _refuses_on_a_cpu(name, problem)), (VLLM_ON_A_GPU, on_a_gpu)):
            if reason is not None:
                unread.setdefault(device, reason)
    return unread


def _refuses_on_a_cpu(name: str, problem: Problem) -> str | None:
    spec, n, k = problem.spec, problem.n, problem.k
    w8a16 = isinstance(spec, Int8) and not spec.rounds_inputs
    w4a8 = isinstance(spec, Int4) and spec.activations != UNQUANTIZED
    if w8a16 or w4a8 or isinstance(spec, NVFP4 | MXFP4 | MXFP8):
        return f"it has no kernel for {spec.label} there"
    if isinstance(spec, Int4) and (n % MULTIPLE or k % MULTIPLE):
        return (
            f"N and K of an INT4 layer have to be multiples of {MULTIPLE} there, and {name} has "
            f"N = {n}, K = {k}"
        )
    return None


def _refuses_on_a_gpu(name: str, problem: Problem, dtype: torch.dtype) -> str | None:
    spec = problem.spec
    if not isinstance(spec, Int4) or spec.activations != UNQUANTIZED or not 0 < spec.group_size < LEAST_GROUP:
        return None
    reason = f"its kernels take INT4 in groups of {LEAST_GROUP} or more, and {name} has {spec.group_size}"
    if not spec.symmetric:
        return reason
    return None if dtype == torch.float16 else f"{reason}; with `--dtype float16` it loads it"
