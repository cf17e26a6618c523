"""Prompts as token ids, every one different from its first token on, so that no server can reuse a prefix."""

import random
from collections.abc import Iterator

from ...base.errors import UserError
from .spec import WorkloadSpec


def prompts(spec: WorkloadSpec) -> Iterator[list[int]]:
    """Endless prompts of `spec.input_len` tokens; the same ones for the same seed."""
    generator = random.Random(spec.seed)
    if spec.token_pool is None:
        return _random_prompts(generator, spec.input_len, spec.vocab_size)
    return _text_prompts(generator, spec.input_len, spec.token_pool)


def _random_prompts(generator: random.Random, length: int, vocab_size: int) -> Iterator[list[int]]:
    while True:
        yield generator.choices(range(vocab_size), k=length)


def _text_prompts(generator: random.Random, length: int, pool: tuple[int, ...]) -> Iterator[list[int]]:
    offsets = len(pool) - length + 1
    if offsets < 1:
        raise UserError(
            f"prompts of {length} tokens were asked for and the text given has {len(pool)}; "
            "give a longer text or shorter prompts"
        )
    while True:
        for offset in generator.sample(range(offsets), offsets):
            yield list(pool[offset : offset + length])
