"""A burst of tiny requests, a fixed number in flight: it shows what a server does for each request.

Not for how fast tokens are generated: answers come whole, and have one token (see `generator.py`).
"""

import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from ..adapters.endpoint import Endpoint

IN_FLIGHT = 8
"""Few, and all requests alike, so that steps have few different shapes.

Libraries keep a kernel for each shape that they meet. With 32 in flight and 4 to 16 prompt tokens, a sound
server in bfloat16 on a CPU grew by 500 MB over 10,000 requests; so, by nothing after the first few hundred.
"""
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 1
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BurstResult:
    """What came of one burst."""

    requests: int
    seconds: float
    """From the first send to the last answer."""
    errors: tuple[str, ...]
    """Of each request that failed."""


def send_burst(
    endpoint: Endpoint, text: Sequence[int], seed: int, requests: int, longest_s: float
) -> BurstResult:
    """Send `requests` tiny requests and wait for all answers; a failed one is recorded, not raised.

    text: token ids that prompts are cut from; longest_s: seconds after which no further request is sent
    """
    return asyncio.run(_send_burst(endpoint, text, seed, requests, longest_s))


async def _send_burst(
    endpoint: Endpoint, text: Sequence[int], seed: int, requests: int, longest_s: float
) -> BurstResult:
    url = endpoint.base_url + "/v1/completions"
    bodies = itertools.islice(_bodies(endpoint.model, text, random.Random(seed)), requests)
    errors: list[str] = []
    sent = 0
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json", **endpoint.headers()}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        # Libraries of models may be in this process; collecting their objects would take longer than a part.
        gc.freeze()
        began = time.perf_counter()

        async def client() -> None:
            nonlocal sent
            while time.perf_counter() - began < longest_s and (body := next(bodies, None)) is not None:
                sent += 1
                if (error := await _send(session, url, body)) is not None:
                    errors.append(error)

        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
        seconds = time.perf_counter() - began
        gc.unfreeze()
    return BurstResult(sent, seconds, tuple(errors))


def _bodies(model: str, text: Sequence[int], draw: random.Random) -> Iterator[bytes]:
    """Endless requests."""
    while True:
        start = draw.randrange(max(1, len(text) - PROMPT_TOKENS))
        body = {
            "model": model,
            "prompt": list(text[start : start + PROMPT_TOKENS]),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        yield json.dumps(body).encode()


async def _send(session: aiohttp.ClientSession, url: str, body: bytes) -> str | None:
    """What went wrong with one request; None if nothing did."""
    try:
        async with session.post(url, data=body) as response:
            answer = await response.read()
            if response.status != 200:
                return f"HTTP {response.status}: {answer[:200].decode(errors='replace')}"
    except TimeoutError:
        return f"no answer within {REQUEST_TIMEOUT_S:.3g} s"
    except aiohttp.ClientError as error:
        return f"{type(error).__name__}: {error}"
    try:
        told = json.loads(answer)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return f"no usage in the answer: {answer[:200].decode(errors='replace')}"
    return None if told == OUTPUT_TOKENS else f"asked for {OUTPUT_TOKENS} tokens, usage says {told}"
