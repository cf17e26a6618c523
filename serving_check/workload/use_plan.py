"""The requests of a load as in use: when each arrives, what it asks for, and with which prompt.

Not for sending them: that is `open_loop.py`.
"""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["greedy", "sampled", "chat", "stop", "end", "logprobs", "aborted"]
"""What a request asks for, besides its tokens:

- greedy, sampled: completions at temperature 0, and at another with a seed
- chat: a conversation; its prompt is what the chat template makes of it
- stop: a completion with a stop string
- end: a completion that ends by the end-of-sequence token
- logprobs: a greedy completion with the log-probabilities of its tokens
- aborted: a completion whose client goes away
"""


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a load as in use."""

    at: float
    """Seconds after the load began."""
    kind: Kind
    prompt: tuple[int, ...] = field(repr=False)
    """Token ids; of a chat, those that the template makes of `messages`."""
    output_len: int
    """The most output tokens; all of them, unless the request may stop earlier."""
    messages: tuple[tuple[str, str], ...] = ()
    """Of a chat: role and content of each."""
    temperature: float = 0.0
    seed: int | None = None
    stop: str | None = None
    """Of kind `stop`: the answer ends before this text."""
    abort_after: int | None = None
    """Of kind `aborted`: chunks after which the client goes away."""
    end_token: int | None = None
    """Of kind `end`: the end-of-sequence token."""
    min_tokens: int = 0
    """Of kind `end`: the tokens before it."""
