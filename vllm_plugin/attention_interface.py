"""The parts of vLLM that the attention backend uses. If one is missing, vLLM keeps its own attention, and the
plugin's other kernels serve all the same.
"""

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills


def offer_backend(backend: type[AttentionBackend]) -> None:
    """Register `backend` under the name that vLLM keeps for others, CUSTOM."""
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        raise ValueError("another plugin has registered an attention backend")
    register_backend(custom, f"{backend.__module__}.{backend.__qualname__}")


__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadataBuilder",
    "get_current_vllm_config_or_none",
    "offer_backend",
    "split_decodes_and_prefills",
]
