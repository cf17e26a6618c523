"""A request's state in the engine: its tokens so far, and its progress."""

from dataclasses import dataclass, field

from .grammar import Matcher
from .request import FinishReason, SamplingParams, TokenLogprobs

UNKNOWN = -1
"""Placeholder for a token that is drawn but not on the host yet."""


@dataclass(eq=False)
class Sequence:
    """A request's state. A sequence waits while it has no row, prefills until all tokens but the last are
    computed, and then decodes. A preempted sequence waits again, and its prompt and output so far are
    computed again."""

    request_id: str
    tokens: list[int]
    """The prompt, then the output."""
    num_prompt: int
    params: SamplingParams
    seed: int
    """params.seed, or a random one. The drawn tokens depend only on it and on their positions."""
    max_len: int
    """The length at which it ends in any case."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the output: the model's end tokens, unless ignored, and the request's own."""
    matcher: Matcher | None = None
    """The position of its output in its grammar, as far as the host knows its tokens."""
    num_computed: int = 0
    """Number of tokens whose keys and values are in the pool."""
    is_long: bool = False
    """Whether its keys are computed as those of a request beyond the original context (LongRoPE)."""
    has_left: bool = False
    """Whether it has left the scheduler: finished, aborted, or its last token is in flight."""
    row: int | None = None
    """Its row in the block table."""
    pages: list[int] = field(default_factory=list)
    is_suspect: bool = False
    """Whether it was in a failed step before it had a token. It is tried again without other suspects."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The logprobs of the prompt's tokens from the second on, as far as they are computed."""
    adjusts_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.adjusts_logits = self.params.adjusts_logits

    @property
    def is_proven(self) -> bool:
        """Say whether a step has given the sequence a token that the host knows."""
        return len(self.tokens) > self.num_prompt and self.tokens[self.num_prompt] != UNKNOWN

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Say whether some of the sequence's prompt logprobs are still to be computed."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def scores(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the prompt's logprobs; None if the request does not ask for them."""
        return None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs)

    @property
    def is_prefilling(self) -> bool:
        """Say whether prompt tokens are left to compute. The last prompt token is prefilled even if it is the
        only one left."""
        return self.num_computed < max(self.num_prompt, len(self.tokens) - 1)

    def finish_reason(self, length: int) -> FinishReason | None:
        """Return why the last of the first `length` tokens ended the sequence; None if it did not."""
        if self.tokens[length - 1] in self.ends:
            return "stop"
        return "length" if length >= self.max_len else None


@dataclass(frozen=True)
class Completion:
    """The offline API's result for one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
