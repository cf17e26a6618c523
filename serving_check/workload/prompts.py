"""Prompts as token ids, every one different from its first token on, so that no server can reuse a prefix.

The closed loop has prompts of one length; `use_plan.py` cuts slices of many lengths.
"""

import random
from collections.abc import Iterable, Iterator, Sequence

from ...base.errors import UserError
from .spec import WorkloadSpec


def prompts(spec: WorkloadSpec) -> Iterator[list[int]]:
    """Yield endless prompts of `spec.input_len` tokens; the same seed gives the same prompts."""
    generator = random.Random(spec.seed)
    if spec.token_pool is None:
        return _random_prompts(generator, spec.input_len, spec.vocab_size)
    return _text_prompts(generator, spec.input_len, spec.token_pool)


class Slices:
    """Slices of a text, of any lengths, no two of which begin alike."""

    def __init__(
        self,
        generator: random.Random,
        text: Sequence[int],
        beginning: int,
        others: Iterable[Sequence[int]] = (),
    ):
        """beginning: number of first tokens, at least one of which differs between any two slices
        others: prompts that the slices must not begin like
        """
        self._generator = generator
        self._text = text
        self._beginning = beginning
        self._begun = {tuple(other[:beginning]) for other in others}

    def cut(self, length: int) -> list[int]:
        """Return a slice that begins like no other; UserError if there is none."""
        offsets = len(self._text) - length + 1
        first = self._generator.randrange(max(1, offsets))
        for offset in range(first, first + offsets):
            found = list(self._text[offset % offsets : offset % offsets + length])
            beginning = tuple(found[: self._beginning])
            if beginning not in self._begun:
                self._begun.add(beginning)
                return found
        raise UserError(
            f"the given text has {len(self._text)} tokens, too few for different prompts of {length} tokens; "
            "give a longer text"
        )

    def any(self, length: int) -> list[int]:
        """Return a slice that may begin like another, at most as long as the text."""
        offset = self._generator.randrange(max(1, len(self._text) - length + 1))
        return list(self._text[offset : offset + length])


def _random_prompts(generator: random.Random, length: int, vocab_size: int) -> Iterator[list[int]]:
    while True:
        yield generator.choices(range(vocab_size), k=length)


def _text_prompts(generator: random.Random, length: int, pool: tuple[int, ...]) -> Iterator[list[int]]:
    offsets = len(pool) - length + 1
    if offsets < 1:
        raise UserError(
            f"prompts need {length} tokens, and the given text has {len(pool)}; "
            "give a longer text or shorter prompts"
        )
    while True:
        for offset in generator.sample(range(offsets), offsets):
            yield list(pool[offset : offset + length])
