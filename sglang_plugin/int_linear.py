"""Layers of INT4 weights in SGLang, stored as compressed-tensors does.

Each function is a hook around a method of SGLang's `CompressedTensorsWNA16`: it is given the method and its
arguments.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from ..base.batch_invariance import BatchInvariance
from ..kernels.hopper.gemm import MAX_ROWS
from ..layouts.formats.int4 import Int4
from ..layouts.packing.layout import Problem
from ..vllm_plugin.choice import Choice, choose
from ..vllm_plugin.compile_ahead import compile_ahead
from ..vllm_plugin.product import attach, empty, multiply
from ..vllm_plugin.speed import measured
from ..vllm_plugin.stored import int4_weight
from ..vllm_plugin.warm_up import PENDING, warm_up

logger = logging.getLogger("sglang.scalegate_kernels")
GPU = "cuda"
WHOLE_ROW = -1
"""SGLang's group size for one scale a row."""
PACKED = "scalegate_kind"
"""The attribute of a layer that `attach` has given a packed weight."""


def process_weights(theirs: Callable[..., None], scheme: Any, layer: Any) -> None:
    """Pack a layer's weight once it is loaded."""
    config = scheme.kernel_config
    spec = spec_of(config) if layer.weight_packed.device.type == GPU else "it is for CUDA GPUs"
    k, n = config.partition_weight_shape
    if isinstance(spec, str):
        log_refusal(f"{config.weight_type} {n}x{k}", spec)
        theirs(scheme, layer)
        return
    choice = choice_for(spec, n, k, config.act_type)
    if choice.layout is None:
        theirs(scheme, layer)
        return
    zeros = None if spec.symmetric else layer.weight_zero_point.data
    weight = int4_weight(spec, layer.weight_packed.data, layer.weight_scale.data, zeros)
    packed = choice.layout.pack(weight, config.act_type)
    attach(layer, packed)
    empty(layer.weight_packed, layer.weight_scale, getattr(layer, "weight_zero_point", None))
    if first_of_its_kind(choice.layout.name, spec, n, k, config.act_type):
        PENDING.append(partial(warm_up, choice.layout, packed, MAX_ROWS))


def apply_weights(
    theirs: Callable[..., Tensor], scheme: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    if hasattr(layer, PACKED):
        return multiply(layer, x, bias)
    return theirs(scheme, layer, x, bias)


def spec_of(config: Any) -> Int4 | str:
    """Return the layer's format, or the reason why the plugin has none for it."""
    k, n = config.partition_weight_shape
    if config.has_g_idx:
        return "columns in another order (g_idx)"
    if config.weight_type.size_bits != 4:
        return f"weights of {config.weight_type.size_bits} bits"
    if config.zero_points and n % 8:
        return f"zero points of {n} rows"
    try:
        return Int4(k if config.group_size == WHOLE_ROW else config.group_size, not config.zero_points)
    except ValueError as error:
        return str(error)


@lru_cache
def choice_for(spec: Int4, n: int, k: int, dtype: torch.dtype) -> Choice:
    """Return the choice for a layer, which is made and logged once for all layers of one shape."""
    server = get_server_args()
    mode: BatchInvariance = "pin" if server.enable_deterministic_inference else "tuned"
    device = torch.device("cuda", torch.cuda.current_device())
    problem = Problem(spec, n, k, dtype, device, None, mode)
    if server.enable_two_batch_overlap:
        choice = Choice(None, "with two micro-batches at once, their products would share scratch memory")
    else:
        choice = choose(problem, measured())
    if choice.layout is None:
        log_refusal(str(problem), choice.reason)
    else:
        logger.info("scalegate-kernels serves %s: %s", problem, choice.reason)
        compile_ahead(choice.layout.name, problem, MAX_ROWS)
    return choice


@lru_cache
def log_refusal(layer: str, reason: str) -> None:
    """Say once that layers like this are left to SGLang."""
    logger.info("scalegate-kernels leaves %s to SGLang: %s", layer, reason)


KINDS: set[tuple[object, ...]] = set()
"""The kinds of layers that this process serves."""


def first_of_its_kind(*kind: object) -> bool:
    is_new = kind not in KINDS
    KINDS.add(kind)
    return is_new
