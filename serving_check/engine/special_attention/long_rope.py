"""LongRoPE (arXiv 2402.13753): requests beyond the model's original context have other rotary frequencies.

transformers chooses the frequencies for a whole batch, by its largest position. Here each request has those
of its own length: cosines and sines are looked up in a table, which transformers' own module has computed for
every position of short and of long requests. A request that outgrows the original context is computed again
from its first token, as transformers' Phi-3 does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LONGROPE = "longrope"

_IS_LONG: ContextVar[Tensor | None] = ContextVar(
    "which tokens of the step belong to long requests", default=None
)


class LongRequests:
    """Which rows of the pool belong to long requests, on the host and on the device."""

    def __init__(self, rows: int, device: torch.device):
        # The last element is for padding.
        self._on_host = torch.zeros(rows + 1, dtype=torch.bool)
        self._on_device = torch.zeros(rows + 1, dtype=torch.bool, device=device)

    def take(self, kinds: Mapping[int, bool]) -> None:
        """Note which rows of a step are long. Steps that are under way do not change."""
        known = self._on_host.tolist()
        changed = {row: is_long for row, is_long in kinds.items() if known[row] != is_long}
        if not changed:
            return
        for row, is_long in changed.items():
            self._on_host[row] = is_long
        # Pinned memory of its own, so that the host neither waits for the copy nor overwrites its source.
        source = self._on_host.pin_memory() if self._on_device.is_cuda else self._on_host
        self._on_device.copy_(source, non_blocking=True)

    def of(self, rows: Tensor) -> Tensor:
        """Return whether tokens belong to long requests, bool [T]; rows: the row of each, int64 [T]."""
        return self._on_device[rows]


@contextmanager
def long_tokens(is_long: Tensor | None) -> Iterator[None]:
    """Inside the `with` block, compute a step of which these tokens belong to long requests, bool [T]."""
    token = _IS_LONG.set(is_long)
    try:
        yield
    finally:
        _IS_LONG.reset(token)


def hook_long_rope(model: PreTrainedModel, original_context: int, longest: int) -> None:
    """Make the model's rotary embeddings look each token up by the kind of its request.

    longest: the tokens of the longest request, more than the original context
    """
    like = torch.zeros(1, 1, dtype=model.dtype, device=model.device)
    positions = torch.arange(longest, device=model.device)[None]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer_type: Mapping[Any, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
        types = [name for name, kind in by_layer_type.items() if kind == LONGROPE]
        if not types:
            continue
        vars(module).pop("forward", None)  # of another engine, for another length
        tables = {}
        with torch.inference_mode():
            for layer_type in types:
                named = () if layer_type is None else (layer_type,)
                # The module looks at the largest position.
                short = module(like, positions[:, :original_context], *named)
                long = module(like, positions, *named)
                tables[layer_type] = [torch.cat(pair, dim=1)[0] for pair in zip(short, long, strict=True)]
        module.forward = MethodType(_hooked(module.forward, tables, original_context), module)


def _hooked(
    plain: Callable[..., Any], tables: Mapping[str | None, list[Tensor]], original_context: int
) -> Callable[..., Any]:
    """Return a rotary embedding's forward.

    tables: by layer type, cosines and sines [C, D]: those of all positions of short requests, then of long
    """

    def forward(self: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        is_long = _IS_LONG.get()
        if is_long is None or layer_type not in tables:
            named = () if layer_type is None else (layer_type,)
            return plain(x, position_ids, *named)
        places = torch.where(is_long.view(position_ids.shape), position_ids + original_context, position_ids)
        return tuple(table[places] for table in tables[layer_type])

    return forward
