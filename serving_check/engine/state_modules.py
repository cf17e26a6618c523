"""Modules whose forward computes with its state directly, rewritten over our states.

In transformers, the forwards of such modules handle a prompt and a decoded token separately and pass their
state to no function, so there is no function to replace. Modules that do pass their state to a function are
in `state_layers.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...layouts.states.last_inputs import LastInputs
from ...layouts.states.linear_recurrence import RecurrenceInputs
from ...layouts.states.mamba2 import Mamba2Inputs
from ...layouts.states.short_convolution import ConvolutionInputs
from ...layouts.states.state_format import StateInputs


class Compute(Protocol):
    """Computes with a state of the layer."""

    def __call__(self, name: str, inputs: StateInputs, like: Tensor, index: int = 0) -> Tensor:
        """Return outputs [T, ...]. name: the state format; index: which state, if a layer has several of one
        format."""


def _lightning_attention(
    module: Any, hidden: Tensor, given: Mapping[str, Any], compute: Compute
) -> tuple[Tensor, None]:
    """Compute MiniMax: S ← exp(-slope) S + k^T v, y = q S, which is Mamba 2 with steps of 1 and without a
    skip.
    """
    tokens, heads = len(hidden), module.num_attention_heads
    states = module.act_fn(module.qkv_proj(hidden)).view(tokens, heads, 3 * module.head_dim)
    query, key, value = states.split(module.head_dim, 2)
    steps = value.new_ones(tokens, heads)
    inputs = Mamba2Inputs(value, steps, key, query, -module.slope_rate[:, 0, 0], None)
    output = module.norm(compute("mamba2", inputs, value).reshape(tokens, 1, -1))
    return module.out_proj(functional.sigmoid(module.output_gate(hidden)) * output), None


def _zaya_projection(
    module: Any, hidden: Tensor, given: Mapping[str, Any], compute: Compute
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ZAYA's compressed convolutional attention (arXiv 2510.04476): queries and keys are convolved,
    and half of each value comes from the token before."""
    tokens, head_dim, shared = len(hidden), module.head_dim, module.num_key_value_groups
    queries, keys = module.q_proj(hidden), module.k_proj(hidden)
    joined = torch.cat([queries, keys], 2)[:, 0]
    window = _window(compute, joined, module.conv_kernel_size, 0)
    convolved = module.conv_qk_grouped(module.conv_qk_depthwise(window)).transpose(1, 2)
    mean = (
        queries.view(tokens, 1, -1, head_dim)
        + keys.view(tokens, 1, -1, head_dim).repeat_interleave(shared, 2)
    ) * 0.5
    query, key = convolved.split([queries.shape[2], keys.shape[2]], 2)
    query = query.reshape(mean.shape) + mean
    key = key.reshape(tokens, 1, -1, head_dim) + mean.view(tokens, 1, -1, shared, head_dim).mean(3)
    # The input is delayed, not its projection: what is before the first token projects to the bias, if any.
    before = _window(compute, hidden[:, 0], 1, 1)[:, None, :, 0]
    value = torch.cat([module.v_proj_current(hidden), module.v_proj_delayed(before)], 2)
    return query, key, value.view(tokens, 1, -1, head_dim)


def _window(compute: Compute, x: Tensor, width: int, index: int) -> Tensor:
    """Return the last inputs of each token and its own, [T, C, width + 1]."""
    return compute("last_inputs", LastInputs(x, width), x[:, :, None].expand(-1, -1, width + 1), index)


def _recurrent_block(
    module: Any, hidden: Tensor, given: Mapping[str, Any], compute: Compute
) -> tuple[Tensor, None]:
    """Compute RecurrentGemma's block: a convolution, then a recurrence with gates, beside a branch without
    state.
    """
    gate = module.act_fn(module.linear_y(hidden))
    x = module.linear_x(hidden)[:, 0]
    convolution = module.conv_1d
    inputs = ConvolutionInputs(x, convolution.weight[:, 0], convolution.bias)
    x = compute("short_convolution", inputs, x)
    unit = module.rg_lru
    by_head = x.view(len(x), unit.num_attention_heads, unit.block_width).transpose(0, 1)
    of_input, of_state = (
        torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).reshape(x.shape).sigmoid()
        for bias, weight in (
            (unit.input_gate_bias, unit.input_gate_weight),
            (unit.recurrent_gate_bias, unit.recurrent_gate_weight),
        )
    )
    log_decay = -8.0 * of_state * functional.softplus(unit.recurrent_param)
    is_first = given["position_ids"].reshape(-1, 1) == 0
    scale = (1 - (2 * log_decay).exp()).sqrt().masked_fill(is_first, 1.0)
    x = x * of_input * scale.to(x.dtype)
    x = compute("linear_recurrence", RecurrenceInputs(x, log_decay), x)
    return module.linear_out(x[:, None] * gate), None


FORWARDS: dict[str, Callable[[Any, Tensor, Mapping[str, Any], Compute], Any]] = {
    "MiniMaxLightningAttention": _lightning_attention,
    "ZayaCCAProjection": _zaya_projection,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}
"""The forward for each class of transformers. It takes the module, tokens [T, 1, H], the call's other
arguments, and `compute`."""


def forward_of(module: nn.Module) -> Callable[[Any, Tensor, Mapping[str, Any], Compute], Any] | None:
    """Return the forward that replaces the module's own over our states, if it needs one."""
    return FORWARDS.get(type(module).__name__)
