"""Layers of INT4 and NVFP4 experts in vLLM, which gives them to Marlin on Hopper: its fused-MoE interface."""

from functools import partial
from typing import Any

from torch import Tensor

from ..kernels.hopper.gemm import MAX_ROWS
from ..layouts.formats.int4 import Int4
from ..layouts.formats.nvfp4 import NVFP4
from ..layouts.formats.weight_format import Weight
from ..layouts.packing.layout import Experts, PackedWeight
from . import cache_key
from .choice import EXPERTS
from .experts_product import Products, products_of, warm_up
from .interface import AUTO, MarlinExperts, MoEActivation, envs, most_rows
from .serving import log_refusal, serves_experts
from .stored import int4_weight, nvfp4_weight
from .warm_up import PENDING, warm_up_pending

MARLIN_DIMS = 3
"""Of Marlin's packed experts; ours have more (`kernels/experts/packed.py`)."""


class ScalegateExperts(MarlinExperts):
    """Experts of one layer in vLLM: our products serve the layer if they are faster, otherwise Marlin's do.

    vLLM chooses the class of a layer's experts before it knows the groups of the weights, so the layer is
    ours if `pack_int4` or `pack_nvfp4` has packed it.
    """

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        if w1.dim() == MARLIN_DIMS:
            return super().moe_problem_size(a1, w1, w2, topk_ids)
        inner = self.moe_config.intermediate_size_per_partition
        return len(w1), len(a1), inner, a1.shape[1], topk_ids.shape[1]

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        if w1.dim() == MARLIN_DIMS:
            super().apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named)
            return
        warm_up_pending()
        products = self.products(w1, w2)
        # vLLM's scratch memory is what Marlin asks for; `output` begins where workspace13 does.
        scratch = named["workspace13"], named["workspace2"]
        products.multiply(hidden_states, topk_ids.int(), topk_weights, scratch, output)

    def products(self, w1: Tensor, w2: Tensor) -> Products:
        config = self.quant_config
        spec = NVFP4() if config.use_nvfp4_w4a16 else Int4(self.block_shape[1], symmetric=False)
        return Products(
            spec,
            (w1, w2),
            (self.w1_scale, self.w2_scale),
            (self.g1_alphas, self.g2_alphas),
            self.moe_config.hidden_dim,
            self.moe_config.intermediate_size_per_partition,
        )


def pack_int4(loaded: Any) -> tuple[Tensor | None, ...] | None:
    """Return the packed words and scales of a layer of experts as vLLM unpacks them, or None if Marlin keeps
    the layer.

    loaded: w13_qweight int32 [E, K/8, N], w13_scales [E, K/g, N], w13_qzeros int32 [E, K/g, N/8] or None, and
            so on: the arguments of vLLM's own packing
    """
    layer, zeros = loaded.layer, (loaded.w13_qzeros, loaded.w2_qzeros)
    reasons = {
        f"activations in {loaded.input_dtype}": loaded.input_dtype is not None,
        f"weights of {loaded.num_bits} bits": loaded.num_bits != 4,
        "columns in another order (g_idx)": loaded.actorder == "group",
        "biases": loaded.w13_bias is not None or loaded.w2_bias is not None,
    }
    refusal = next((reason for reason, holds in reasons.items() if holds), None)
    if refusal is not None:
        log_refusal("experts", refusal)
        return None
    try:
        spec = Int4(loaded.group_size, symmetric=zeros[0] is None)
    except ValueError as error:
        log_refusal(f"experts of INT4 in groups of {loaded.group_size}", str(error))
        return None
    if not is_ours(layer, spec):
        return None
    tensors = (
        (loaded.w13_qweight, loaded.w13_scales, zeros[0]),
        (loaded.w2_qweight, loaded.w2_scales, zeros[1]),
    )
    gate_up, down = (pack(int4_weights(spec, *each), layer) for each in tensors)
    products = products_of(spec, gate_up, down)
    compile_once(layer, products)
    no_order = loaded.w13_g_idx.new_empty((len(loaded.w13_g_idx), 0))
    # Then: four of the columns' order, zero points, scales of inputs, biases.
    return (*products.words, *products.scale_words, *(no_order,) * 4, *(None,) * 6)


def int4_weights(spec: Int4, words: Tensor, scale: Tensor, zeros: Tensor | None) -> list[Weight]:
    """Return the weight of each expert; tensors are as `pack_int4` has them."""
    return [
        int4_weight(spec, words[i].data.t(), scale[i].data.t(), None if zeros is None else zeros[i].data.t())
        for i in range(len(words))
    ]


def pack_nvfp4(loaded: Any) -> tuple[Tensor | None, ...] | None:
    """Return the packed words, scales and factors of a layer of experts, or None if Marlin keeps the layer.

    loaded: w13 uint8 [E, N, K/2], w13_scale e4m3 [E, N, K/16], w13_scale_2 fp32 [E], a multiplier, and so on:
            the arguments of vLLM's own packing
    """
    layer, spec = loaded.layer, NVFP4()
    if not is_ours(layer, spec):
        return None
    tensors = (
        (loaded.w13, loaded.w13_scale, loaded.w13_scale_2),
        (loaded.w2, loaded.w2_scale, loaded.w2_scale_2),
    )
    gate_up, down = (
        pack([nvfp4_weight(*of_expert) for of_expert in zip(*(t.data for t in each), strict=True)], layer)
        for each in tensors
    )
    products = products_of(spec, gate_up, down)
    compile_once(layer, products)
    by_weight = zip(products.words, products.scale_words, products.factor, strict=True)
    return tuple(tensor for of_weight in by_weight for tensor in of_weight)


def is_ours(layer: Any, spec: Int4 | NVFP4) -> bool:
    """Say whether our products serve the layer and are faster."""
    config = layer.moe_config
    shape = f"{config.num_local_experts} experts of {spec.key}"
    parallel = config.moe_parallel_config
    reasons = {
        "--moe-backend chooses another kernel": config.moe_backend != AUTO,
        "VLLM_DISABLED_KERNELS names it": ScalegateExperts.__name__ in envs.VLLM_DISABLED_KERNELS,
        "an activation other than SiLU": config.activation != MoEActivation.SILU,
        "clamped activations": config.swiglu_limit is not None,
        "adapters (LoRA)": config.is_lora_enabled,
        "experts on several GPUs (expert parallelism)": parallel.use_ep,
        "router weights on the input": layer.apply_router_weight_on_input,
    }
    refusal = next((reason for reason, holds in reasons.items() if holds), None)
    if refusal is not None:
        log_refusal(shape, refusal)
        return False
    experts = Experts(config.num_local_experts, config.experts_per_token)
    n, k = 2 * config.intermediate_size_per_partition, config.hidden_dim
    return serves_experts(spec, n, k, config.in_dtype, experts)


def pack(weights: list[Weight], layer: Any) -> PackedWeight:
    return EXPERTS[type(weights[0].spec)].pack_experts(weights, layer.moe_config.in_dtype)


def compile_once(layer: Any, products: Products) -> None:
    """At the first layer of its kind, see that everything is compiled that layers of this kind will need."""
    config = layer.moe_config
    experts = f"{config.num_local_experts} experts, top {config.experts_per_token}"
    kind = f"{experts} {products.spec.key} {products.hidden} {products.inner} {config.in_dtype}"
    if kind not in cache_key.SERVED:
        most = most_rows() or MAX_ROWS
        PENDING.append(partial(warm_up, products, config.experts_per_token, config.in_dtype, most))
        cache_key.SERVED.add(kind)
