"""Sends one request, reads its answer and times it; both loops send with this module, closed and open.

The client shares the machine with the measured server, so it reads bytes and parses almost no JSON.
"""

import itertools
import json
import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..adapters.endpoint import Endpoint
from ..adapters.prometheus_text import parse_metrics
from .spec import RequestRecord

# In JSON a quote inside a string is escaped, so these match keys of the chunk and never its text.
_HAS_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_IS_FIRST = re.compile(rb'"index"\s*:\s*0\b')
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_HAS_ERROR = re.compile(rb'"error"\s*:\s*\{')
DATA = b"data: "
_DONE = b"data: [DONE]"

Body = dict[str, Any]


@dataclass(frozen=True)
class TimedRequest:
    """One request as it is sent, and the conditions for its answer."""

    url: str
    body: bytes
    output_len: int | None
    """How many tokens the answer must have, or all choices together, else it is an error; None if it may
    end earlier."""
    keeps_events: bool
    """Whether the stream's events that have a choice or usage are kept. An answer that is not streamed is
    always kept, as one event."""
    abort_after: int | None = None
    """After how many events with a choice the client closes the connection; None to read to the end."""
    is_streamed: bool = True
    choices: int = 1
    """How many answers are requested; if several, the events of the first are timed."""


def streamed_body(
    endpoint: Endpoint, prompt: Body, output_len: int, temperature: float, keeps_answer: bool
) -> Body:
    """Return the JSON of a request for `output_len` tokens.

    prompt: the fields with the prompt. keeps_answer: whether to ask for token ids, if the server reports them
    """
    body = {
        "model": endpoint.model,
        **prompt,
        "max_tokens": output_len,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.takes_repetition_penalty:
        # Answers are judged by the model's logits, and a penalty of its maker's would change them.
        body["repetition_penalty"] = 1.0
    if keeps_answer and endpoint.takes_return_token_ids:
        body["return_token_ids"] = True
    return body


async def send_request(
    session: aiohttp.ClientSession, request: TimedRequest, origin: float
) -> tuple[RequestRecord, list[bytes]]:
    """Send one request and read its answer to the end; return its record, and the events with a choice or
    usage if they are kept.
    """
    sent = time.perf_counter()
    stamps: list[float] = []
    kept: list[bytes] = []
    usage: dict[str, int] = {}
    error = None
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(request.url, data=request.body, headers=headers) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {_message(await response.read())}"
            elif request.is_streamed:
                usage, error = await _read_stream(response, request, stamps, kept)
            else:
                kept.append(DATA + await response.read())
    except TimeoutError:
        error = f"no end within {session.timeout.total:.3g} s"
    except aiohttp.ClientError as exception:
        error = f"{type(exception).__name__}: {exception}"
    ended = time.perf_counter()
    if kept and not request.is_streamed:
        usage, error = _usage_of(kept[0].removeprefix(DATA))
    output_tokens = usage.get("completion_tokens", 0)
    if error is None and request.output_len not in (None, output_tokens):
        error = f"asked for {request.output_len} tokens, usage says {output_tokens}"
    record = RequestRecord(
        start=sent - origin,
        ttft=stamps[0] - sent if stamps else None,
        itls=tuple(later - earlier for earlier, later in itertools.pairwise(stamps)),
        e2el=ended - sent,
        output_tokens=output_tokens,
        prompt_tokens=usage.get("prompt_tokens", 0),
        total_tokens=usage.get("total_tokens"),
        error=error,
        is_streamed=request.is_streamed,
    )
    return record, kept


async def read_metrics(session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, float]:
    """Return `/metrics`, or nothing if the server has none: an engine can be measured without it."""
    try:
        async with session.get(endpoint.base_url + "/metrics") as response:
            return parse_metrics(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return {}


async def _read_stream(
    response: aiohttp.ClientResponse, request: TimedRequest, stamps: list[float], kept: list[bytes]
) -> tuple[dict[str, int], str | None]:
    """Note the time of every event with a choice, the first of several; return the usage, and an error if
    there was one.

    kept: gets the events with a choice or usage, if the request keeps them
    """
    usage: dict[str, int] = {}
    pending = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if _HAS_CHOICE.search(event):
                if request.choices == 1 or _IS_FIRST.search(event):
                    stamps.append(now)
                if request.keeps_events:
                    kept.append(event)
                if len(stamps) == request.abort_after:
                    response.close()
                    return usage, None
            elif event.startswith(_DONE):
                return usage, None if usage else "the stream carried no usage"
            elif _HAS_ERROR.search(event):
                return usage, _message(event.removeprefix(DATA))
            if _HAS_USAGE.search(event):
                if request.keeps_events and kept[-1:] != [event]:
                    kept.append(event)
                usage = json.loads(event.removeprefix(DATA))["usage"]
    return usage, "the stream ended without [DONE]"


def _usage_of(body: bytes) -> tuple[dict[str, int], str | None]:
    """Return the usage of an answer that was not streamed, and an error if it has none."""
    try:
        usage = json.loads(body)["usage"]
        return ({}, "the answer's usage is no object") if not isinstance(usage, dict) else (usage, None)
    except (ValueError, KeyError, TypeError):
        return {}, f"the answer has no usage: {body[:200].decode(errors='replace')}"


def _message(body: bytes) -> str:
    """Return the message of an OpenAI-shaped error, or the beginning of any other answer."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
