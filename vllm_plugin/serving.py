"""The shared work of the kernels of all formats for a layer: choose, say so in vLLM's log, pack, warm up."""

from functools import lru_cache, partial

import torch
from torch import nn

from ..base.batch_invariance import BatchInvariance
from ..kernels.hopper.gemm import MAX_ROWS
from ..layouts.formats.weight_format import Weight, WeightFormat
from ..layouts.packing.layout import Experts, Problem
from . import cache_key
from .choice import Choice, choose, choose_experts
from .compile_ahead import compile_ahead, compile_experts_ahead
from .interface import envs, logger, most_rows, two_at_once
from .product import attach
from .speed import measured
from .warm_up import PENDING, warm_up


def choice_for(spec: WeightFormat, n: int, k: int, dtype: torch.dtype) -> Choice:
    """Return the choice for a layer, which is made and logged once for all layers of one shape."""
    mode: BatchInvariance = "pin" if envs.VLLM_BATCH_INVARIANT else "tuned"
    return _told(Problem(spec, n, k, dtype, torch.device("cuda", torch.cuda.current_device()), None, mode))


@lru_cache
def _told(problem: Problem) -> Choice:
    if two_at_once():
        choice = Choice(None, "with two micro-batches at once, their products would share scratch memory")
    else:
        choice = choose(problem, measured())
    if choice.layout is None:
        log_refusal(str(problem), choice.reason)
    else:
        logger.info("scalegate-kernels serves %s: %s", problem, choice.reason)
        compile_ahead(choice.layout.name, problem, most_rows() or MAX_ROWS)
    return choice


@lru_cache
def serves_experts(spec: WeightFormat, n: int, k: int, dtype: torch.dtype, experts: Experts) -> bool:
    """Say whether layers of such experts are ours; [n, k] is the shape of one expert's first weight. Says so
    once.
    """
    problem = Problem(spec, n, k, dtype, torch.device("cuda", torch.cuda.current_device()), experts)
    decision = choose_experts(problem, measured())
    if decision.ours:
        logger.info("scalegate-kernels serves %s: %s", problem, decision.reason)
        compile_experts_ahead(problem, most_rows() or MAX_ROWS)
    else:
        log_refusal(str(problem), decision.reason)
    return decision.ours


@lru_cache
def log_refusal(layer: str, reason: str) -> str:
    """Say once that layers like this are left to vLLM; return the reason."""
    logger.info("scalegate-kernels leaves %s to vLLM: %s", layer, reason)
    return reason


def serve(layer: nn.Module, weight: Weight, dtype: torch.dtype) -> None:
    """Pack the weight of a chosen layer, and have everything compiled that it will need."""
    n, k = weight.shape
    choice = choice_for(weight.spec, n, k, dtype)
    if choice.layout is None:
        raise RuntimeError(f"this layer was not chosen: {choice.reason}")
    packed = choice.layout.pack(weight, dtype)
    attach(layer, packed)
    kind = f"{choice.layout.name} {weight.spec.key} {n}x{k} {dtype}"
    if kind not in cache_key.SERVED:
        PENDING.append(partial(warm_up, choice.layout, packed, most_rows() or MAX_ROWS))
        cache_key.SERVED.add(kind)
