"""`logits_to_keep` for models of transformers whose forward does not know it, such as MiniCPM-V's.

Such a forward ignores the argument and returns the logits of all tokens, so a caller who asks for some rows
would use the wrong ones.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

ARGUMENT = "logits_to_keep"


def take_logits_to_keep(model: PreTrainedModel) -> None:
    """Let the model's forward take the argument, as other models do: n for the last n tokens, 0 for all, or
    indices.
    """
    plain = model.forward
    if ARGUMENT in inspect.signature(plain).parameters:
        return

    def forward(*args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> Any:
        if not isinstance(logits_to_keep, Tensor) and logits_to_keep == 0:
            return plain(*args, **kwargs)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)

        def keep(head: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            return (given[0][:, kept],)

        # Asked for at every call: loading replaces the head by a packed one.
        hook = model.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            return plain(*args, **kwargs)
        finally:
            hook.remove()

    model.forward = forward  # type: ignore[method-assign]
