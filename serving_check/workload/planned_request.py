"""One request of a load as in use: what it asks for, and when.

`use_plan.py` plans them, `open_loop.py` sends them.
"""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "greedy",
    "sampled",
    "chat",
    "stop",
    "end",
    "logprobs",
    "adjusted",
    "repetition",
    "choices",
    "truncated",
    "aborted",
]
"""What a request asks for, besides its tokens. One of each kind but the last is not streamed:

- greedy, sampled: completions at temperature 0, and at another with a seed; some sampled ones are chats
- chat: a conversation; its prompt is what the chat template makes of it
- stop: with a stop string
- end: ends by the end-of-sequence token
- logprobs: greedy, with the log-probabilities of its tokens
- adjusted: greedy, with penalties on tokens of the answer, and a bias against some tokens
- repetition: greedy, with a penalty on tokens of the prompt and of the answer
- choices: sampled, and several answers are asked for
- truncated: sampled, with top-k, top-p or min-p
- aborted: a completion whose client goes away

One of each kind from `stop` to `truncated` is a chat, if both servers take that kind in chats.
"""


@dataclass(frozen=True)
class Adjustments:
    """What is added to the logits that a request's tokens are chosen by."""

    presence_penalty: float
    """Subtracted from the logit of each token that the answer has already."""
    frequency_penalty: float
    """Subtracted from a token's logit for each time that the answer has it already."""
    bias: tuple[tuple[int, float], ...]
    """Added to the logits of these tokens."""
    repetition_penalty: float = 1.0
    """Logits above 0 of tokens that the prompt or the answer has are divided by it, others multiplied."""


@dataclass(frozen=True)
class Truncation:
    """The most likely tokens that a request's tokens are drawn from."""

    top_k: int = -1
    """How many of them; -1 for all."""
    top_p: float = 1.0
    """Their probability together, at least."""
    min_p: float = 0.0
    """The least probability of each, as a share of the most likely one's."""


WHOLE = Truncation()


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a load as in use."""

    at: float
    """Seconds after the load began."""
    kind: Kind
    prompt: tuple[int, ...] = field(repr=False)
    """The prompt's token ids; for a chat, the token ids that the template makes from `messages`."""
    output_len: int
    """The number of output tokens of each answer, or the most if the request may end earlier."""
    messages: tuple[tuple[str, str], ...] = ()
    """The role and the content of each message of a chat."""
    text: str | None = None
    """The prompt as text, if it is sent so; else its token ids are sent."""
    temperature: float = 0.0
    seed: int | None = None
    stop: str | None = None
    """For kind `stop`: the text before which the answer ends."""
    abort_after: int | None = None
    """For kind `aborted`: the number of chunks after which the client goes away."""
    end_token: int | None = None
    """For kind `end`: the end-of-sequence token."""
    min_tokens: int = 0
    """For kind `end`: the least number of tokens before the end-of-sequence token."""
    adjustments: Adjustments | None = None
    """For kind `adjusted`: what is added to the logits."""
    choices: int = 1
    """How many answers are requested: several for kind `choices`."""
    truncation: Truncation = WHOLE
    """For kind `truncated`: the tokens that may be drawn."""
    is_streamed: bool = True

    @property
    def route(self) -> str:
        return route_of(is_chat=bool(self.messages))

    @property
    def full_kind(self) -> str:
        """The request's kind, whether it is a chat or a text, and whether it is not streamed."""
        chat = " chat" if self.messages and self.kind != "chat" else ""
        text = "" if self.text is None else " text"
        return ("" if self.is_streamed else "unstreamed ") + self.kind + chat + text

    @property
    def may_end_early(self) -> bool:
        """Say whether the request's answer may have fewer tokens than `output_len`."""
        return self.kind in ("stop", "end", "aborted")


def route_of(is_chat: bool) -> str:
    return "/v1/chat/completions" if is_chat else "/v1/completions"
