"""A burst of tiny requests, a fixed number in flight, which shows the cost of each request for a server.

The requests are of every kind that the server accepts, one kind after the other, since a server may keep
memory for one kind alone. A burst does not show how fast tokens are generated: answers have one token (see
`generator.py`).
"""

import asyncio
import gc
import json
import random
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..adapters.endpoint import Endpoint
from .planned_request import Kind, route_of

IN_FLIGHT = 8
"""Few, and all requests alike, so that steps have few different shapes.

Libraries keep a kernel for each shape that they meet. With 32 in flight and 4 to 16 prompt tokens, a sound
server in bfloat16 on a CPU grew by 500 MB over 10,000 requests; so, by nothing after the first few hundred.
"""
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 1
LEFT_TOKENS = 8
"""How many tokens a client requests that goes away after the first chunk."""
WHOLE: Kind = "greedy"
IN_TURN: tuple[Kind, ...] = (WHOLE, "sampled", "logprobs", "stop", "chat", "aborted")
"""The kinds of requests in a part, in this order. Sampled and aborted ones are streamed, the others are
not."""
GREETING = {"messages": [{"role": "user", "content": "Hello"}]}
"""The message of all chats: prompts of different lengths would have different shapes."""
NEVER_SAID = "\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}"
USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BurstResult:
    """The results of one burst."""

    requests: int
    seconds: float
    """Seconds from the first send to the last answer."""
    errors: tuple[str, ...]
    """The error of each request that failed."""


@dataclass(frozen=True)
class _Tiny:
    """One tiny request of a burst."""

    tokens: int
    """Number of tokens in its answer."""
    body: bytes
    route: str
    is_left: bool
    """Whether its client goes away."""


def send_burst(
    endpoint: Endpoint,
    text: Sequence[int],
    seed: int,
    requests: int,
    longest_s: float,
    kinds: Collection[Kind] = (WHOLE,),
    prompts_each: int = 1,
) -> BurstResult:
    """Send `requests` tiny requests and wait for all answers; a failed one is recorded, not raised.

    text:      token ids that prompts are cut from
    longest_s: seconds after which no further request is sent
    kinds:     those that the server accepts; there are equally many requests of each prompts_each: prompts in
               one HTTP request; the engine has a request for each
    """
    return asyncio.run(_send_burst(endpoint, text, seed, requests, longest_s, kinds, prompts_each))


def leave_long_answers(endpoint: Endpoint, text: Sequence[int], requests: int, tokens: int) -> None:
    """Ask for answers of that many tokens at once, and disconnect after the first chunk of each."""
    body = {"model": endpoint.model, "prompt": list(text[:PROMPT_TOKENS]), "max_tokens": tokens}
    body |= {"temperature": 0.0, "ignore_eos": True, "stream": True}
    request = _Tiny(tokens, json.dumps(body).encode(), route_of(is_chat=False), is_left=True)

    async def leave() -> None:
        async with _session(endpoint) as session:
            await asyncio.gather(*(_send(session, endpoint, request) for _ in range(requests)))

    asyncio.run(leave())


def _session(endpoint: Endpoint) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json", **endpoint.headers()}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers)


async def _send_burst(
    endpoint: Endpoint,
    text: Sequence[int],
    seed: int,
    requests: int,
    longest_s: float,
    kinds: Collection[Kind],
    prompts_each: int,
) -> BurstResult:
    tiny = _requests(endpoint.model, text, random.Random(seed), requests // prompts_each, kinds, prompts_each)
    errors: list[str] = []
    sent = 0
    async with _session(endpoint) as session:
        # Libraries of models may be in this process; collecting their objects would take longer than a part.
        gc.freeze()
        began = time.perf_counter()

        async def client() -> None:
            nonlocal sent
            while time.perf_counter() - began < longest_s and (request := next(tiny, None)) is not None:
                sent += prompts_each
                if (error := await _send(session, endpoint, request)) is not None:
                    errors.append(error)

        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
        seconds = time.perf_counter() - began
        gc.unfreeze()
    return BurstResult(sent, seconds, tuple(errors))


def _requests(
    model: str,
    text: Sequence[int],
    draw: random.Random,
    requests: int,
    kinds: Collection[Kind],
    prompts_each: int,
) -> Iterator[_Tiny]:
    """Yield equally many requests of each kind, kind after kind, so that requests in flight are alike."""
    chosen = [kind for kind in IN_TURN if kind in kinds]
    for index in range(requests):
        kind = chosen[index * len(chosen) // requests]
        body = {
            "model": model,
            **(GREETING if kind == "chat" else _prompts(text, draw, prompts_each)),
            "max_tokens": LEFT_TOKENS if kind == "aborted" else OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            **_own_fields(kind, draw),
        }
        tokens = prompts_each * OUTPUT_TOKENS
        yield _Tiny(tokens, json.dumps(body).encode(), route_of(kind == "chat"), is_left=kind == "aborted")


def _prompts(text: Sequence[int], draw: random.Random, count: int) -> dict[str, Any]:
    starts = [draw.randrange(max(1, len(text) - PROMPT_TOKENS)) for _ in range(count)]
    prompts = [list(text[start : start + PROMPT_TOKENS]) for start in starts]
    return {"prompt": prompts if count > 1 else prompts[0]}


def _own_fields(kind: Kind, draw: random.Random) -> dict[str, Any]:
    if kind == "sampled":
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"temperature": 1.0, "seed": draw.getrandbits(31), **streamed}
    if kind == "logprobs":
        return {"logprobs": 1}
    if kind == "stop":
        return {"stop": [NEVER_SAID]}
    return {"stream": True} if kind == "aborted" else {}


async def _send(session: aiohttp.ClientSession, endpoint: Endpoint, request: _Tiny) -> str | None:
    """Return the error of one request; None if there was none."""
    try:
        async with session.post(endpoint.base_url + request.route, data=request.body) as response:
            if request.is_left and response.status == 200:
                await response.content.readany()
                response.close()
                return None
            answer = await response.read()
            if response.status != 200:
                return f"HTTP {response.status}: {answer[:200].decode(errors='replace')}"
    except TimeoutError:
        return f"no answer within {REQUEST_TIMEOUT_S:.3g} s"
    except aiohttp.ClientError as error:
        return f"{type(error).__name__}: {error}"
    told = USAGE.findall(answer)
    if not told:
        return f"no usage in the answer: {answer[:200].decode(errors='replace')}"
    tokens = int(told[-1])
    return None if tokens == request.tokens else f"asked for {request.tokens} tokens, usage says {tokens}"
