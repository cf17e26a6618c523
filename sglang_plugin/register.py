"""The entry point: SGLang calls `register` once in each of its processes, before it loads a model.

Every error here becomes one line in the log, and SGLang then serves as without the plugin.
"""

import logging
import os
from typing import Any

from ..vllm_plugin.register import VARIABLE, StepsAside

KNOWN = "0.5.16"
"""The version of SGLang that the plugin was run with."""
SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
SCHEME = f"{SCHEMES}.compressed_tensors_wNa16.CompressedTensorsWNA16"
"""SGLang's layers of 4-bit and 8-bit integers with 16-bit activations."""

logger = logging.getLogger("sglang.scalegate_kernels")


def register() -> None:
    try:
        register_kernels()
    except StepsAside as reason:
        logger.info("scalegate-kernels does not serve: %s", reason)
    except Exception as error:  # a plugin that fails must not end a server
        logger.info("scalegate-kernels does not serve: %s: %s", type(error).__name__, error)


def register_kernels() -> None:
    """Put the kernels around SGLang's own, by its registry of hooks."""
    if os.environ.get(VARIABLE) == "0":
        raise StepsAside(f"{VARIABLE}=0")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__ as found

    if found != KNOWN:
        raise StepsAside(f"it knows SGLang {KNOWN}; this is {found}")
    from .int_linear import apply_weights, process_weights

    hooks: dict[str, Any] = {
        "process_weights_after_loading": process_weights,
        "apply_weights": apply_weights,
    }
    for method, hook in hooks.items():
        HookRegistry.register(f"{SCHEME}.{method}", hook, HookType.AROUND)
