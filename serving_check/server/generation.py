"""One HTTP request's sequences on their way from engine tokens to text, and their end.

`responses.py` makes the JSON.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.request import FinishReason, SamplingParams, TokenLogprobs
from .engine_client import EngineClient, Mailbox, NewTokens
from .text import IncrementalDecoder, StopStrings


@dataclass(frozen=True)
class Delta:
    """The news of one sequence: some tokens, the text that became certain with them, perhaps its end."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """The prompt's logprobs, in the first delta of a sequence whose request asks for them."""


class Generation:
    """The sequences of one request: `n` for each prompt, numbered prompt by prompt."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Any | None,
        request_id: str,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        n: int,
        stop: Sequence[str],
        skip_special_tokens: bool = True,
    ):
        self.prompts = [prompt for prompt in prompts for _ in range(n)]
        """Each sequence's prompt."""
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._engine = engine
        self._mailbox = Mailbox()
        self._params = [_nth(of_prompt, i) for of_prompt in params for i in range(n)]
        self._ids = [f"{request_id}-{index}" for index in range(len(self.prompts))]
        self._texts = [
            SequenceText(tokenizer, stop, own.min_tokens, skip_special_tokens) for own in self._params
        ]

    @property
    def completion_tokens(self) -> int:
        return sum(text.tokens for text in self._texts)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Submit the sequences, then yield their news until all have ended. If the iteration is left early,
        the sequences that still run are aborted.
        """
        try:
            for index, request_id in enumerate(self._ids):
                self._engine.submit(
                    request_id, index, self.prompts[index], self._params[index], self._mailbox
                )
            unfinished = set(range(len(self._ids)))
            while unfinished:
                deltas = []
                for index, new in (await self._mailbox.take()).items():
                    if index not in unfinished:
                        continue
                    delta = self._texts[index].add(index, new)
                    if new.prompt_logprobs is not None:
                        delta = dataclasses.replace(delta, prompt_logprobs=new.prompt_logprobs)
                    deltas.append(delta)
                    if delta.finish_reason is not None:
                        unfinished.discard(index)
                        self._engine.abort(self._ids[index])
                if deltas:
                    yield deltas
        finally:
            for request_id in self._ids:
                self._engine.abort(request_id)


class SequenceText:
    """The text of one sequence, cut at its stop string, and the number of tokens it took."""

    def __init__(
        self, tokenizer: Any | None, stop: Sequence[str], min_tokens: int, skip_special_tokens: bool
    ):
        """min_tokens: before this many tokens, no stop string ends the text"""
        self.tokens = 0
        self._min_tokens = min_tokens
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stop)
        self._one_by_one = bool(stop)

    def add(self, index: int, new: NewTokens) -> Delta:
        if not self._one_by_one:
            return self._add_all(index, new)
        text = ""
        last = len(new.token_ids) - 1
        for position, token in enumerate(new.token_ids):
            # One token at a time: usage counts up to the token that completed the stop string.
            reason = new.finish_reason if position == last else None
            token_alone = NewTokens([token], new.logprobs[position : position + 1], reason)
            self.tokens += 1
            decoded = self._decode(token_alone)
            text += decoded if self.tokens <= self._min_tokens else self._stops.feed(decoded)
            if self._stops.found:
                logprobs = new.logprobs[: position + 1]
                return Delta(index, text, new.token_ids[: position + 1], logprobs, "stop")
        if new.finish_reason is not None:
            text += self._stops.flush()
        return Delta(index, text, new.token_ids, new.logprobs, new.finish_reason)

    def _add_all(self, index: int, new: NewTokens) -> Delta:
        self.tokens += len(new.token_ids)
        text = self._decode(new)
        return Delta(index, text, new.token_ids, new.logprobs, new.finish_reason)

    def _decode(self, new: NewTokens) -> str:
        """Return the text of the given tokens; the token that ended the sequence is counted but not shown."""
        shown = new.token_ids[:-1] if new.finish_reason == "stop" else new.token_ids
        text = self._decoder.add(shown)
        return text if new.finish_reason is None else text + self._decoder.flush()


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """Return the request's settings for the n-th sequence of a prompt, with its own seed."""
    if params.seed is None or index == 0:
        return params
    return dataclasses.replace(params, seed=(params.seed + index) & (2**63 - 1))
