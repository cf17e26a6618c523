"""LongRoPE (arXiv 2402.13753): requests beyond the model's original context have other rotary frequencies.

transformers chooses the frequencies for a whole batch, by its largest position. Here a step computes requests
of one kind only. A request that outgrows the original context is computed again from its first token, as
transformers' Phi-3 does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

LONGROPE = "longrope"

_IS_LONG: ContextVar[bool] = ContextVar("whether the requests of the step are long", default=False)


@contextmanager
def long_requests(is_long: bool) -> Iterator[None]:
    """Inside the `with` block, compute requests that are longer than the original context, or none such."""
    token = _IS_LONG.set(is_long)
    try:
        yield
    finally:
        _IS_LONG.reset(token)


def hook_long_rope(model: nn.Module, original_context: int) -> None:
    """Make the model's rotary embeddings take the long frequencies for long requests, at every position."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if LONGROPE in kinds and "forward" not in module.__dict__:
            module.forward = MethodType(_hooked(module.forward, original_context), module)  # type: ignore[method-assign]


def _hooked(plain: Callable[..., Any], original_context: int) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _IS_LONG.get():
            return plain(x, position_ids, *args, **kwargs)
        # The module looks at the largest position: one more than fit makes it choose the long frequencies.
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), original_context)
        cosine, sine = plain(x, torch.cat((position_ids, beyond), -1), *args, **kwargs)
        return cosine[..., :-1, :], sine[..., :-1, :]

    return forward
