"""As much of vLLM 0.26's attention as the plugin touches, for `stand_in.py`."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionBackend:
    """Checks a layer as vLLM's does, by what its subclass supports."""

    @classmethod
    def validate_configuration(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size=None,
        has_sliding_window=False,
        use_kv_connector=False,
    ):
        supported = {
            "head_size": head_size in cls.get_supported_head_sizes(),
            "dtype": dtype in cls.supported_dtypes,
            "kv_cache_dtype": kv_cache_dtype in cls.supported_kv_cache_dtypes,
            "block_size": not (block_size or 0) % cls.get_supported_kernel_block_sizes()[0],
            "sliding window": not has_sliding_window,
            "KV connector": not use_kv_connector or cls.supports_kv_connector(),
        }
        return [f"{name} not supported" for name, is_supported in supported.items() if not is_supported]


class AttentionImpl:
    def __class_getitem__(cls, kind):
        return cls


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    def __class_getitem__(cls, kind):
        return cls

    def _init_reorder_batch_threshold(self, threshold):
        self.reorder_batch_threshold = threshold


def split_decodes_and_prefills(given, decode_threshold):
    counts = given.query_start_loc_cpu.diff()
    decodes = int((counts <= decode_threshold).int().cumprod(0).sum())
    return decodes, given.num_reqs - decodes, decodes, given.num_actual_tokens - decodes


def registry() -> dict[str, Any]:
    """Return a registry of its own, in which nothing is registered."""
    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(Enum):
        TRITON_ATTN = "triton"
        CUSTOM = None

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides[self]

    return {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": overrides.__setitem__}


def config() -> dict[str, Any]:
    """The parts of vLLM's configuration that attention looks at."""
    model = SimpleNamespace(
        is_hybrid=False,
        hf_text_config=SimpleNamespace(layer_types=["full_attention"] * 2),
        get_sliding_window=lambda: None,
        max_model_len=128,
        dtype=torch.float16,
    )
    return {
        "model_config": model,
        "cache_config": SimpleNamespace(kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        "speculative_config": None,
        "device_config": SimpleNamespace(device_type="cpu"),
        "compilation_config": SimpleNamespace(static_forward_context={}),
    }


def modules(backends: dict[str, Any]) -> dict[str, dict[str, Any]]:
    base = "vllm.v1.attention"
    classes = (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder)
    return {
        "vllm.v1": {},
        base: {},
        f"{base}.backend": {each.__name__: each for each in classes},
        f"{base}.backends": {},
        f"{base}.backends.registry": backends,
        f"{base}.backends.utils": {"split_decodes_and_prefills": split_decodes_and_prefills},
    }
