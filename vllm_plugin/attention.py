"""An attention backend of vLLM for keys and values in `int4_per_token_head`, with our kernels.

What a step does is in `int4_pages.py`. Decoding runs in full CUDA graphs; a step with prompts runs the
attention of each layer between vLLM's graphs. `--attention-backend CUSTOM` chooses it.
"""

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.attention.decode import DecodeWorkspace
from ..kernels.attention.options import AttentionOptions
from ..kernels.attention.per_token.store import TokenPages
from . import cache_key
from .attention_interface import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    get_current_vllm_config_or_none,
    split_decodes_and_prefills,
)
from .int4_pages import MOST_WIDENED, Step, attend, memory_shape, pages_in, prompts_of, store, warm_up
from .interface import logger

KV_DTYPE = "int4_per_token_head"
SERVED = f"{cache_key.KEYS_AND_VALUES}{KV_DTYPE}"
HEAD_SIZES = [64, 128, 256]
PAGE = 64
"""Tokens in a page: as many as the decode kernel reads at a time."""
INSTEAD = "start vLLM with --attention-backend TRITON_ATTN"


class ScalegateAttentionBackend(AttentionBackend):
    """Decoder attention without windows, over pages of our own format in vLLM's memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [KV_DTYPE]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["ScalegateAttention"]:
        return ScalegateAttention

    @staticmethod
    def get_builder_cls() -> type["StepBuilder"]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return HEAD_SIZES

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return memory_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *values: Any, **named: Any) -> list[str]:
        """Return why vLLM cannot use this backend for a layer; vLLM then stops and tells the user."""
        reasons = super().validate_configuration(*values, **named)
        if not reasons and (reason := refusal_of(get_current_vllm_config_or_none())):
            reasons = [reason]
        return reasons


def refusal_of(config: Any) -> str | None:
    """Return why a configuration of vLLM is not served; None if it is.

    All layers of a model must use one page format, because layers of different kinds share memory.
    """
    if config is None:
        return "no configuration is set"
    model, parallel, text = config.model_config, config.parallel_config, config.model_config.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    if model.is_hybrid or kinds - {"full_attention", "attention"}:
        return "layers of several kinds share memory"
    if model.get_sliding_window() is not None or getattr(text, "attention_chunk_size", None) is not None:
        return "sliding window not supported"
    if config.speculative_config is not None:
        return "speculative decoding not supported"
    if config.cache_config.kv_cache_dtype_skip_layers:
        return "--kv-cache-dtype-skip-layers not supported"
    if config.cache_config.kv_sharing_fast_prefill:
        return "--kv-sharing-fast-prefill not supported"
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism not supported"
    if parallel.use_ubatching:
        return "two micro-batches at once would share scratch memory"
    return None


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of what vLLM knows about a step, once for all layers."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        layers = vllm_config.compilation_config.static_forward_context
        refuse_mixed(layers)
        channels = PAGE * kv_cache_spec.num_kv_heads * kv_cache_spec.head_size
        self.most_pages = MOST_WIDENED // (2 * channels * torch.float16.itemsize)
        for implementation in {id(layers[name].impl): layers[name].impl for name in layer_names}.values():
            implementation.warm_up(vllm_config.model_config.dtype)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        given = common_attn_metadata
        num_decodes, num_prompts, _, _ = split_decodes_and_prefills(given, decode_threshold=1)
        prompts = None
        if num_prompts:
            prompts = prompts_of(
                num_decodes,
                given.query_start_loc_cpu.numpy(),
                given.seq_lens_cpu_upper_bound.numpy(),  # exact: it is a bound if tokens are drafted
                given.block_table_tensor,
                PAGE,
                self.most_pages,
            )
        return Step(given.num_actual_tokens, num_decodes, given.block_table_tensor, given.seq_lens, prompts)


def refuse_mixed(layers: dict[str, Any]) -> None:
    """Raise ValueError if a layer of the model has pages of another kind: it would share their memory."""
    attention = [
        layer for layer in layers.values() if isinstance(getattr(layer, "impl", None), AttentionImpl)
    ]
    kinds = {
        (layer.attn_backend, layer.num_kv_heads, layer.head_size, layer.head_size_v) for layer in attention
    }
    if len(kinds) > 1 or any(layer.head_size != layer.head_size_v for layer in attention):
        raise ValueError(
            f"scalegate-kernels does not serve this model's different kinds of layers; {INSTEAD}"
        )


WORKSPACES: dict[Hashable, DecodeWorkspace] = {}
"""Scratch memory of decoding, which layers share, since they run one after another."""
WARM: set[Hashable] = set()
"""The kinds of layers whose kernels are compiled."""


def workspace_for(heads: int, dim: int) -> DecodeWorkspace:
    """Allocate while vLLM loads the model, so that its measurement of memory counts these bytes."""
    config = get_current_vllm_config_or_none()
    if config is None:
        raise RuntimeError("a layer is made while vLLM loads a model")
    rows, longest = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    device = torch.device(config.device_config.device_type)
    key = heads, dim, rows, longest, device
    if key not in WORKSPACES:
        WORKSPACES[key] = DecodeWorkspace.allocate(rows, heads, dim, longest, device)
    return WORKSPACES[key]


class ScalegateAttention(AttentionImpl[Step]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = KV_DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        others |= {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window}
        # Among the others are numbers that mean nothing if they are False or -1.
        unknown = [name for name, value in others.items() if value is not None and value not in (False, -1)]
        if unknown:
            raise NotImplementedError(f"scalegate-kernels does not serve {', '.join(unknown)}; {INSTEAD}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.options = AttentionOptions(scale, softcap=logits_soft_cap or None)
        self.workspace = workspace_for(num_heads, head_size)
        self._memory: Tensor | None = None
        self._pages: tuple[TokenPages, TokenPages] | None = None
        if SERVED not in cache_key.SERVED:
            logger.info("scalegate-kernels serves %s", SERVED)
            cache_key.SERVED.add(SERVED)

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        store(key, value, slot_mapping, self._pages_of(kv_cache))

    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            # vLLM measures its memory: this much is needed by the largest step.
            torch.empty(MOST_WIDENED + 4 * query.numel(), dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        attend(query, self._pages_of(kv_cache), attn_metadata, self.workspace, self.options, output)
        return output

    def warm_up(self, dtype: torch.dtype) -> None:
        kind = self.num_heads, self.num_kv_heads, self.head_size, self.options, dtype
        if kind not in WARM:
            warm_up(self.num_kv_heads, PAGE, self.workspace, self.options, dtype)
            WARM.add(kind)

    def _pages_of(self, memory: Tensor) -> tuple[TokenPages, TokenPages]:
        if self._pages is None or memory is not self._memory:
            self._memory, self._pages = memory, pages_in(memory)
        return self._pages
