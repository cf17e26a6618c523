"""One request on its way through the engine: its tokens so far, and where it stands."""

from dataclasses import dataclass, field

from .grammar import Matcher
from .request import FinishReason, SamplingParams, TokenLogprobs

UNKNOWN = -1
"""Stands for a token that is drawn but not yet on the host."""


@dataclass(eq=False)
class Sequence:
    """A request. It waits while it has no row, prefills until all its tokens but the last are computed, then
    decodes; preempted, it waits again and recomputes prompt and output alike."""

    request_id: str
    tokens: list[int]
    """The prompt, then the output."""
    num_prompt: int
    params: SamplingParams
    seed: int
    """params.seed, or one drawn for this request: tokens depend on it and the position only."""
    max_len: int
    """Length at which it ends, whatever it says."""
    ends: frozenset[int] = frozenset()
    """Tokens that end it: the model's, unless they are ignored, and its own."""
    matcher: Matcher | None = None
    """Where its output stands in the grammar that it follows, as far as the host knows its tokens."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pool."""
    has_left: bool = False
    """Out of the scheduler: finished, aborted, or its last token is under way."""
    row: int | None = None
    """Its row in the block table."""
    pages: list[int] = field(default_factory=list)
    is_suspect: bool = False
    """It was in a step that failed, before it had a token: it is tried again with no other such one."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as it is computed."""
    adjusts_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.adjusts_logits = self.params.adjusts_logits

    @property
    def is_proven(self) -> bool:
        """Whether a step has given it a token that the host knows."""
        return len(self.tokens) > self.num_prompt and self.tokens[self.num_prompt] != UNKNOWN

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of its prompt are still wanted."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def scores(self) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's logprobs, where they are wanted."""
        return None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs)

    @property
    def is_prefilling(self) -> bool:
        """Its prompt's last token is the prompt's work also where it is the only one left."""
        return self.num_computed < max(self.num_prompt, len(self.tokens) - 1)

    def finish_reason(self, length: int) -> FinishReason | None:
        """Whether the last of the first `length` tokens ended it, and why."""
        if self.tokens[length - 1] in self.ends:
            return "stop"
        return "length" if length >= self.max_len else None


@dataclass(frozen=True)
class Completion:
    """What the offline API gives for one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
