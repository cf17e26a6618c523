"""Every part of vLLM that the plugin uses. No other file asks which vLLM there is.

Importing this file imports vLLM; if a part is missing, ImportError or AttributeError names it, and the plugin
does nothing.
"""

import sys
from collections.abc import Callable

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

# In the namespace of vLLM, whose logging it then follows.
logger = init_logger("vllm.scalegate_kernels")

AUTO = "auto"
MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
"""The module of vLLM that imports the Marlin kernel by name."""


def offer(
    integers: type[MPLinearKernel],
    nvfp4: type[MarlinNvFp4LinearKernel],
    setting: str,
    value: Callable[[], str],
) -> None:
    """Offer our kernels before vLLM's own, and make the key of its compile cache depend on `value`.

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


def linear_backend() -> str:
    """The value of `--linear-backend`."""
    config = get_current_vllm_config_or_none()
    return AUTO if config is None else config.kernel_config.linear_backend


def two_at_once() -> bool:
    """Whether two streams run one layer at the same time (`--enable-dbo`)."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.use_ubatching


def most_rows() -> int | None:
    """The number of rows in the largest step; None unless vLLM is loading a model."""
    config = get_current_vllm_config_or_none()
    return None if config is None else config.scheduler_config.max_num_batched_tokens


__all__ = [
    "AUTO",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "MarlinNvFp4LinearKernel",
    "current_platform",
    "envs",
    "linear_backend",
    "logger",
    "most_rows",
    "offer",
    "permute_param_layout_",
    "scalar_types",
    "two_at_once",
]
