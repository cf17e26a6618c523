"""Outputs that follow a grammar: llguidance says which tokens may come next, as a bit mask.

llguidance is optional. llguidance is loaded when the first request asks for a grammar.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from .device_copies import to_device

BITS = 32
MISSING = "a grammar takes llguidance, which is not installed here; pip install llguidance"


class Grammars:
    """Makes matchers for one tokenizer and a model's vocabulary."""

    def __init__(self, tokenizer: Any | None, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._prepared: Any = None

    def matcher(self, grammar: str) -> "Matcher":
        """Return a matcher at the start of `grammar`, in llguidance's form. A matcher that cannot be made
        raises UserError.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise UserError(MISSING)
        if self._tokenizer is None:
            raise UserError("a grammar needs a tokenizer, and this checkpoint has none")
        import llguidance
        import llguidance.hf

        if self._prepared is None:
            self._prepared = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
        matcher = llguidance.LLMatcher(self._prepared, grammar)
        if matcher.is_error():
            raise UserError(f"the grammar cannot be used: {matcher.get_error()}"[:1000])
        return Matcher(matcher)


class Matcher:
    """The position of one output in its grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def fill(self, mask: Tensor) -> None:
        """Write the tokens that may come next to mask, int32 [ceil(V / 32)] on the CPU, lowest bit first.

        At the end of the grammar, only the end-of-sequence token may come.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


def masked(scores: Tensor, matchers: list[Matcher]) -> Tensor:
    """Return scores [A, V], one row for each matcher, with -inf where a token may not come."""
    vocab_size = scores.shape[1]
    words = torch.zeros(len(matchers), -(-vocab_size // BITS), dtype=torch.int32)
    for row, matcher in zip(words, matchers, strict=True):
        matcher.fill(row)
    tokens = torch.arange(vocab_size, device=scores.device)
    bits = to_device(words, scores.device)[:, tokens // BITS] >> (tokens % BITS)
    return scores.masked_fill((bits & 1) == 0, -torch.inf)
