"""Turns tokens into text as they arrive, without broken characters between chunks and without parts of a stop
string.

Whole texts are converted by the tokenizer's own `decode`, with the same results. tokenizers' `DecodeStream`
is quicker but cannot be finished: the text that it holds back is lost at the end, and it holds back all text
after broken bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_WINDOW = 14
"""The most tokens in the window before it moves on; every step decodes all of them."""
KEPT_CONTEXT = 5
"""How many tokens stay in the window when it moves, since a decoder may look back at them."""


class IncrementalDecoder:
    """Text of a growing token sequence; `add` returns what became certain, `flush` the uncertain rest.

    The end of a decoded text is uncertain while it is replacement characters: a character of several bytes
    may be complete only with the next token.
    """

    def __init__(self, tokenizer: Any | None, skip_special_tokens: bool = True):
        # The Rust tokenizer under transformers' wrapper decodes in a tenth of the wrapper's time.
        self._decode = (
            None if tokenizer is None else getattr(tokenizer, "backend_tokenizer", tokenizer).decode
        )
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._sent = 0
        """Number of characters of the window's text that were returned already."""

    def add(self, token_ids: Sequence[int]) -> str:
        if self._decode is None:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window, skip_special_tokens=self._skip)
        certain = text.rstrip(REPLACEMENT)
        if len(self._window) > 16 * MAX_WINDOW:
            certain = text[: max(len(certain), len(text) - 4)]
        new = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if len(self._window) > MAX_WINDOW and len(certain) == len(text):
            self._move_window(self._decode, text)
        return new

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        if self._decode is None:
            return ""
        text = self._decode(self._window, skip_special_tokens=self._skip)
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _move_window(self, decode: Callable[..., str], text: str) -> None:
        """Forget all but the last tokens, unless this tokenizer's text depends on the forgotten ones."""
        kept = self._window[-KEPT_CONTEXT:]
        kept_text = decode(kept, skip_special_tokens=self._skip)
        if text.endswith(kept_text.lstrip(REPLACEMENT)):
            self._window = kept
            self._sent = len(kept_text)


class StopStrings:
    """Cuts a text off before the first stop string, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Return the part of `text`, and of the text held back, that is certainly before any stop string."""
        if not self._stops or self.found:
            return "" if self.found else text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found = True
            self._held = ""
            return text[: min(starts)]
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    @property
    def held(self) -> str:
        """Return the end of the text that may be the beginning of a stop string."""
        return self._held

    def flush(self) -> str:
        """Return the text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
