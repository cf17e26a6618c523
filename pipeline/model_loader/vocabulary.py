"""Refuses tokens beyond a model's vocabulary, since such tokens have no row in the model's embedding."""

from typing import Any

from torch import Tensor

from ...base.errors import UserError
from ..checkpoints.checkpoint import Checkpoint
from .skeleton import model_config


def refuse_unknown_tokens(ids: Tensor, tokenizer: Any, checkpoint: Checkpoint) -> None:
    """Raise UserError if a token id that the tokenizer gave is beyond the checkpoint's vocabulary."""
    size = model_config(checkpoint).get_text_config().vocab_size
    largest = int(ids.max()) if ids.numel() else 0
    if largest >= size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model {checkpoint.source} only {size}: "
            f"token {largest} of the text is unknown to the model; put the model's own tokenizer beside its "
            "weights"
        )
