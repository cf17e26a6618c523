"""Sparse attention within the length up to which it is dense, and served as dense attention.

Layers of DeepSeek-V3.2, GLM-5 or MiniMax-M3 have an indexer, which chooses the keys that each query sees. If
a context is short enough, the indexer chooses all of it, and the layer is ordinary causal attention.
Attention to chosen keys is not supported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .own_attention import NEEDS_A_MASK

INDEXER = "indexer"
"""The name of the module that chooses keys, in models of transformers."""

CHOSEN_KEYS = {"attention_mask", "indices", "block_indices"}
"""Arguments by which sparse layers tell their attention function what the indexer has chosen."""


def _chosen_tokens(config: Any) -> int | None:
    # Indexers that choose among pools of keys see one that is not complete in ways of their own.
    return None if hasattr(config, "index_kpool") else getattr(config, "index_topk", None)


def _chosen_blocks(config: Any) -> int | None:
    blocks, size = (getattr(config, name, None) for name in ("index_topk_blocks", "index_block_size"))
    return blocks * size if blocks and size else None


_DENSE_LENGTHS: dict[str, Callable[[Any], int | None]] = {
    "indexed_attention": _chosen_tokens,
    "minimax_m3_sparse": _chosen_blocks,
}


def dense_length(config: Any, layer_type: str) -> int | None:
    """Return the longest context in which layers of this type see every key; None if that is not known."""
    length = _DENSE_LENGTHS.get(layer_type)
    return None if length is None else length(config)


def skip_indexers(model: PreTrainedModel) -> bool:
    """Let no indexer of the model run; return whether there are any."""
    indexers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == INDEXER]
    for indexer in indexers:
        indexer.forward = _choose_nothing  # type: ignore[method-assign]
    return bool(indexers)


def unread_mask(model: nn.Module, device: torch.device) -> Tensor | None:
    """Return an attention mask that no code reads, for models that take no None: each indexer gets a slice of
    it.
    """
    needs_one = any(
        name.rpartition(".")[2] == INDEXER or type(module).__name__ == NEEDS_A_MASK
        for name, module in model.named_modules()
    )
    return torch.zeros(1, 1, 1, 1, device=device) if needs_one else None


def _choose_nothing(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """Replaces an indexer. The indexer's output reaches the attention function, which does not read it."""
    return hidden_states.new_empty(0, dtype=torch.int32)
