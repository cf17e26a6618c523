"""The entry point: vLLM calls `register` once in each of its processes, before it loads a model.

Every error here becomes one line in the log, and vLLM then serves as without the plugin.
"""

import logging
import multiprocessing
import os

VARIABLE = "SCALEGATE_KERNELS"
"""The environment variable that turns the plugin off if it is 0."""
OLDEST, NEXT_UNKNOWN = (0, 26), (0, 27)
"""The versions of vLLM that the plugin was run with: from the first one, before the second one."""
HOPPER = (9, 0)

# Before vLLM's own logging can be imported: it configures this name's parent.
logger = logging.getLogger("vllm.scalegate_kernels")


class StepsAside(Exception):
    """Raised if the plugin does not serve here, with the reason in a few words."""


def register() -> None:
    try:
        register_kernels()
    except StepsAside as reason:
        _say(f"scalegate-kernels does not serve: {reason}")
    except Exception as error:  # a plugin that fails must not end a server
        _say(f"scalegate-kernels does not serve: {type(error).__name__}: {error}")


def register_kernels() -> None:
    """Offer the kernels to vLLM, and make its compile cache depend on them."""
    if os.environ.get(VARIABLE) == "0":
        raise StepsAside(f"{VARIABLE}=0")
    found = installed_vllm()
    if not OLDEST <= found < NEXT_UNKNOWN:
        oldest, unknown, this = (".".join(map(str, each)) for each in (OLDEST, NEXT_UNKNOWN, found))
        raise StepsAside(f"it knows vLLM from {oldest} on, before {unknown}; this is {this}")
    from . import interface

    platform = interface.current_platform
    if not platform.is_cuda():
        raise StepsAside("it is for CUDA GPUs")
    capability = platform.get_device_capability()
    if capability is None or tuple(capability) != HOPPER:
        raise StepsAside("its kernels are for Hopper (compute capability 9.0)")
    from .cache_key import factor
    from .experts import ScalegateExperts, pack_int4, pack_nvfp4
    from .int_linear import ScalegateLinearKernel
    from .nvfp4_linear import ScalegateNvFp4LinearKernel
    from .pdl import with_pdl

    interface.offer(ScalegateLinearKernel, ScalegateNvFp4LinearKernel, VARIABLE, factor)
    try:
        interface.offer_experts(ScalegateExperts, pack_int4, pack_nvfp4)
    except (AttributeError, TypeError) as error:
        _say(f"scalegate-kernels leaves all experts to vLLM: {error}")
    try:
        offer_attention()
    except (AttributeError, ImportError, ValueError) as error:
        _say(f"scalegate-kernels leaves all attention to vLLM: {error}")
    try:
        interface.offer_compilation(with_pdl)
    except (AttributeError, TypeError) as error:
        _say(f"scalegate-kernels leaves vLLM's own graphs as they are: {error}")


def offer_attention() -> None:
    from .attention import ScalegateAttentionBackend
    from .attention_interface import offer_backend

    offer_backend(ScalegateAttentionBackend)


def installed_vllm() -> tuple[int, int]:
    """Return the installed vLLM's major and minor version; (0, 0) if the build has no version."""
    import vllm

    try:
        major, minor = vllm.__version__.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0


def _say(line: str) -> None:
    """Log a line once for each server, not in each of its processes, since all of them decide alike."""
    if multiprocessing.parent_process() is not None:
        return
    if logger.hasHandlers():
        logger.info(line)
    else:  # from vLLM 0.32 on it configures its logging after it has loaded plugins
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": line}))
