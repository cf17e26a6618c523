"""Every part of vLLM that the plugin uses, but for attention (`attention_interface.py`). No other file asks
which vLLM is installed.

Importing this file imports vLLM; if a part is missing, ImportError or AttributeError names it, and the plugin
does nothing.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from inspect import Signature, signature
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm import envs
from vllm.compilation.compiler_interface import InductorStandaloneAdaptor
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle import int_wna16, nvfp4
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

# In the namespace of vLLM, whose logging it then follows.
logger = init_logger("vllm.scalegate_kernels")

AUTO = "auto"
MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
"""The module of vLLM that imports the Marlin kernel by name."""
INT4_ARGUMENTS = (
    "layer", "input_dtype", "num_bits", "group_size", "actorder", "w13_qweight", "w2_qweight", "w13_scales",
    "w2_scales", "w13_g_idx", "w13_qzeros", "w2_qzeros", "w13_bias", "w2_bias",
)  # fmt: skip
"""The arguments of vLLM's packing of INT4 experts that ours uses."""
NVFP4_ARGUMENTS = ("layer", "w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")
"""The same of NVFP4 experts."""
COMPILER_OPTIONS = "compiler_config"
"""The argument of vLLM's compiler with the options for Inductor."""


def offer(
    integers: type[MPLinearKernel],
    nvfp4: type[MarlinNvFp4LinearKernel],
    setting: str,
    value: Callable[[], str],
) -> None:
    """Offer our kernels before vLLM's own, and make the key of vLLM's compile cache depend on `value`.

    `register_linear_kernel` would append them. NVFP4's kernel, which is a Marlin kernel too, is installed
    where vLLM would choose Marlin: for weight-only layers vLLM chooses it by name and not from the table.
    """
    mixed = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    fp4 = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    before_marlin = fp4.index(MarlinNvFp4LinearKernel)
    # The values of vLLM's settings, each a function of no arguments, are in that key.
    envs.environment_variables[setting] = value
    mixed.insert(0, integers)
    fp4.insert(before_marlin, nvfp4)
    linear.MarlinNvFp4LinearKernel = nvfp4
    if MODELOPT in sys.modules:
        vars(sys.modules[MODELOPT])["MarlinNvFp4LinearKernel"] = nvfp4


Packing = Callable[[Any], tuple[Tensor | None, ...] | None]
"""Packs the tensors of a layer of experts, which are attributes of its argument, and returns what vLLM's own
packing would; None if the layer is left to that.
"""


def offer_experts(experts: type[MarlinExperts], pack_int4: Packing, pack_nvfp4: Packing) -> None:
    """Have vLLM choose `experts`, which are Marlin's too, where it would choose Marlin's, and ask our packing
    before Marlin's.

    vLLM has no register of experts: it looks these names up in the modules of its choosers.
    """
    process_int4 = asking_first(pack_int4, int_wna16._process_weights_marlin, INT4_ARGUMENTS)
    prepare_nvfp4 = asking_first(pack_nvfp4, nvfp4.prepare_nvfp4_moe_layer_for_marlin, NVFP4_ARGUMENTS)
    experts_for = nvfp4.backend_to_kernel_cls
    int_wna16.MarlinExperts = experts
    int_wna16._process_weights_marlin = process_int4
    nvfp4.prepare_nvfp4_moe_layer_for_marlin = prepare_nvfp4
    nvfp4.backend_to_kernel_cls = lambda backend: [
        experts if each is MarlinExperts else each for each in experts_for(backend)
    ]


def asking_first(ours: Packing, theirs: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Return vLLM's packing `theirs`, which first asks ours. `arguments` are those arguments of vLLM's
    packing that ours uses; TypeError is raised if it lacks one.
    """
    form = signature_with(theirs, arguments)

    @wraps(theirs)
    def asked(*values: Any, **named: Any) -> Any:
        bound = form.bind(*values, **named)
        bound.apply_defaults()
        packed = ours(SimpleNamespace(**bound.arguments))
        return theirs(*values, **named) if packed is None else packed

    return asked


def signature_with(function: Callable[..., Any], arguments: tuple[str, ...]) -> Signature:
    """Return the signature of one of vLLM's functions; TypeError is raised if it lacks one of the
    arguments.
    """
    form = signature(function)
    missing = [name for name in arguments if name not in form.parameters]
    if missing:
        raise TypeError(f"{function.__name__} has no argument {', '.join(missing)}")
    return form


CompilerOptions = dict[str, Any]


def offer_compilation(around: Callable[[CompilerOptions], AbstractContextManager[CompilerOptions]]) -> None:
    """Have vLLM compile each graph inside `around`, which is given Inductor's options and returns others."""
    theirs = InductorStandaloneAdaptor.compile
    form = signature_with(theirs, (COMPILER_OPTIONS,))

    @wraps(theirs)
    def compile_inside(*values: Any, **named: Any) -> Any:
        bound = form.bind(*values, **named)
        with around(bound.arguments[COMPILER_OPTIONS] or {}) as options:
            bound.arguments[COMPILER_OPTIONS] = options
            return theirs(*bound.args, **bound.kwargs)

    InductorStandaloneAdaptor.compile = compile_inside


def linear_backend() -> str:
    """The value of `--linear-backend`."""
    config = get_current_vllm_config_or_none()
    return AUTO if config is None else config.kernel_config.linear_backend


def two_at_once() -> bool:
    """Say whether two streams run one layer at the same time (`--enable-dbo`)."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.use_ubatching


def most_rows() -> int | None:
    """Return the number of rows in the largest step; None unless vLLM is loading a model."""
    config = get_current_vllm_config_or_none()
    return None if config is None else config.scheduler_config.max_num_batched_tokens


__all__ = [
    "AUTO",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "MarlinExperts",
    "MarlinNvFp4LinearKernel",
    "MoEActivation",
    "current_platform",
    "envs",
    "linear_backend",
    "logger",
    "most_rows",
    "offer",
    "offer_compilation",
    "offer_experts",
    "permute_param_layout_",
    "scalar_types",
    "two_at_once",
]
