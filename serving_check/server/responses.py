"""The JSON of both generation APIs, whole and in chunks; OpenAI's field names and no others but vLLM's."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.request import TokenLogprobs
from .generation import Delta, Generation
from .schema import ChatCompletionRequest, CompletionRequest
from .tool_calls import ToolCall, ToolFormat, ToolParser, numbered

ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI and vLLM write the same number."""


def usage(generation: Generation) -> dict[str, int]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"data: {ENCODE(body)}\n\n".encode()


def choice_event(head: str, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
    """Return the event of a chunk with one choice. head: the beginning of all chunks of a stream, encoded
    once
    """
    rest = "".join(f",{ENCODE(key)}:{ENCODE(value)}" for key, value in more.items())
    return f'data: {head[:-1]},"choices":[{ENCODE(choice)}]{rest}}}\n\n'.encode()


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class TokenTexts:
    """The text of single tokens, for logprobs."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            # Without a tokenizer a token is shown by its id, as vLLM does on request.
            text = f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode([token_id])
            self._known[token_id] = text
        return text


@dataclass
class Choice:
    """One sequence, collected for an unstreamed answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class Completions:
    """Makes the `text_completion` objects of one request."""

    chunk_object = whole_object = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        texts: TokenTexts,
        asked: CompletionRequest,
        prompts: Sequence[list[int]],
        echo: Sequence[str] | None,
    ):
        """prompts: the prompt of each sequence; echo: the prompts' texts, if they are shown"""
        self.head = {"id": request_id, "created": int(time.time()), "model": model}
        self._texts = texts
        self._asked = asked
        self._prompts = prompts
        self._unshown = dict(enumerate(echo or ()))
        """Texts of prompts that still have to be shown before the text of their sequences."""
        self._offsets: dict[int, int] = {}
        """Number of characters in each sequence's text before the next token."""

    def opening(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the choices of a stream before its first token, and the fields beside each choice."""
        return []

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta)
        return {**choice, "token_ids": delta.token_ids} if self._asked.return_token_ids else choice

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        prompt = self._prompts[choice.index]
        return {**self._choice(choice), **whole_extra(choice, prompt, self._asked, self._texts)}

    def _choice(self, new: Delta | Choice) -> dict[str, Any]:
        echo = self._unshown.pop(new.index, None)
        token_ids, logprobs = new.token_ids, list[TokenLogprobs | None](new.logprobs)
        if echo is not None and new.prompt_logprobs is not None:
            token_ids = [*self._prompts[new.index], *token_ids]
            logprobs = [None, *new.prompt_logprobs, *logprobs]
        return {
            "index": new.index,
            "text": (echo or "") + new.text,
            "logprobs": self._logprobs_of(new.index, token_ids, logprobs),
            "finish_reason": new.finish_reason,
        }

    def _logprobs_of(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        """logprobs: the logprobs of each token; None for a prompt's first token, which nothing predicts"""
        if self._asked.logprobs is None:
            return None
        tokens = [self._texts[token] for token in token_ids]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and finite(entry.logprob) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [entry and self._top(entry) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        best = entry.top[: self._asked.logprobs]
        return {self._texts[token]: finite(logprob) for token, logprob in reversed(best)}


def whole_extra(
    choice: Choice, prompt: list[int], asked: CompletionRequest | ChatCompletionRequest, texts: TokenTexts
) -> dict[str, Any]:
    """Return vLLM's fields of a choice, if the request asks for them."""
    extra: dict[str, Any] = {}
    if asked.return_token_ids:
        extra |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt}
    if asked.prompt_logprobs is not None:
        entries = zip(prompt[1:], choice.prompt_logprobs or (), strict=True)
        known = [_prompt_entry(token, entry, asked.prompt_logprobs, texts) for token, entry in entries]
        extra["prompt_logprobs"] = [None, *known]
    return extra


def _prompt_entry(token: int, entry: TokenLogprobs, count: int, texts: TokenTexts) -> dict[str, Any]:
    """Return log-probabilities by token id: of the most likely tokens, and of the token itself."""
    found = [(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:count], 1)]
    if token not in (other for other, _, _ in found):
        found.append((token, entry.logprob, entry.rank or 0))
    return {
        str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts[other]}
        for other, logprob, rank in found
    }


class ChatCompletions:
    """Makes the `chat.completion` and `chat.completion.chunk` objects of one request."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        texts: TokenTexts,
        asked: ChatCompletionRequest,
        prompts: Sequence[list[int]],
        tools: ToolFormat | None,
    ):
        """prompts: the prompt of each sequence. tools: the form of calls, if calls are allowed"""
        self.head = {"id": request_id, "created": int(time.time()), "model": model}
        self._texts = texts
        self._asked = asked
        self._prompts = prompts
        most = None if asked.parallel_tool_calls else 1
        self._parsers = [] if tools is None else [ToolParser(tools, asked.must_call, most) for _ in prompts]

    def opening(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the chunk with the role, which comes before any text, together with the prompt's ids, as in
        vLLM.
        """
        delta = {"role": "assistant", "content": ""}
        return [
            (
                {"index": i, "delta": delta, "logprobs": None, "finish_reason": None},
                {"prompt_token_ids": prompt} if self._asked.return_token_ids else {},
            )
            for i, prompt in enumerate(self._prompts)
        ]

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        new: dict[str, Any] = {"content": delta.text}
        reason: str | None = delta.finish_reason
        if self._parsers:
            before = self._parsers[delta.index].found
            text, calls = self._parsed(delta)
            new = {"content": text} if text or not calls else {}
            new |= {"tool_calls": list(numbered(calls, before))} if calls else {}
            reason = self._reason(delta)
        choice = {
            "index": delta.index,
            "delta": new,
            "logprobs": self._logprobs_of(delta.token_ids, delta.logprobs),
            "finish_reason": reason,
        }
        return {**choice, "token_ids": delta.token_ids} if self._asked.return_token_ids else choice

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        if self._parsers:
            text, calls = self._parsed(choice)
            if calls:
                message |= {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
            reason = self._reason(choice)
        whole = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_of(choice.token_ids, choice.logprobs),
            "finish_reason": reason,
        }
        return {**whole, **whole_extra(choice, self._prompts[choice.index], self._asked, self._texts)}

    def _parsed(self, new: Delta | Choice) -> tuple[str, list[ToolCall]]:
        """Return the new text and the new calls; at the end, return all that is left of them."""
        parser = self._parsers[new.index]
        text, calls = parser.feed(new.text)
        if new.finish_reason is not None:
            more, last = parser.flush()
            text, calls = text + more, calls + last
        return text, calls

    def _reason(self, new: Delta | Choice) -> str | None:
        called = new.finish_reason == "stop" and self._parsers[new.index].found > 0
        return "tool_calls" if called else new.finish_reason

    def _logprobs_of(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        if self._asked.wanted_logprobs is None:
            return None
        content = [
            {
                **self._token(token, entry.logprob),
                "top_logprobs": [self._token(top, logprob) for top, logprob in entry.top],
            }
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token_id]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


Api = Completions | ChatCompletions
