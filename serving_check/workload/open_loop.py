"""Sends requests at their planned times, whatever happened to earlier ones, and records each.

`use_plan.py` makes the requests, and `generator.py` sends a fixed number of requests at a time.
"""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from ..adapters.endpoint import Endpoint
from .answers import read_answer, read_envelope
from .engine_work import difference, preemptions, steps_by_running
from .planned_request import PlannedRequest
from .sending import Body, TimedRequest, read_metrics, send_request, streamed_body
from .spec import RequestRecord

LOGPROBS = 5
"""How many alternatives' logprobs are requested for each token: the most that OpenAI's API allows."""
NEVER_SAID = ("\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}", "\N{COMET}\N{COMET}\N{COMET}")
"""Stop strings sent before and after the one that ends the answer: a server must look for all of them."""
END_BIAS = 100
"""The logit bias of the end token: the most that OpenAI's API allows, more than any difference of logits."""


@dataclass(frozen=True)
class OpenLoopResult:
    """The results of one open loop."""

    began: float
    """When the clock of the records was zero, in seconds of `time.perf_counter`."""
    duration: float
    """Seconds from the first send to the last end."""
    requests: tuple[PlannedRequest, ...]
    records: tuple[RequestRecord, ...]
    """One for each of `requests`, in their order, with its prompt and its answer."""
    steps_by_running: dict[int, int] | None
    """How many decode steps ran with how many requests in them; None if the server does not say."""
    generation_tokens: float | None
    """By how much the server's own counter of generated tokens rose; None if it has no such counter."""
    preemptions: int | None
    model: str | None = None
    """The name that requests call the model by."""
    began_at: float | None = None
    """When the clock of the records was zero, in seconds since 1970; None if it is not known."""


def run_open_loop(
    endpoint: Endpoint, requests: Sequence[PlannedRequest], request_timeout: float
) -> OpenLoopResult:
    """Send `requests` to `endpoint` and wait for all answers; a failed request is recorded, not raised."""
    return asyncio.run(_run(endpoint, requests, request_timeout))


async def _run(
    endpoint: Endpoint, requests: Sequence[PlannedRequest], request_timeout: float
) -> OpenLoopResult:
    # A connection for each request, as from users who do not know of one another.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=request_timeout)
    headers = endpoint.headers()
    timed = [timed_request(endpoint, planned) for planned in requests]
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before = await read_metrics(session, endpoint)
        # As in the closed loop: what is there already is not looked at again meanwhile.
        gc.freeze()
        origin, began_at = time.perf_counter(), time.time()

        async def send(at: float, request: TimedRequest) -> tuple[RequestRecord, list[bytes]]:
            await asyncio.sleep(at - (time.perf_counter() - origin))
            return await send_request(session, request, origin)

        pairs = zip(requests, timed, strict=True)
        sent = await asyncio.gather(*(send(planned.at, request) for planned, request in pairs))
        gc.unfreeze()
        after = await read_metrics(session, endpoint)
    records = tuple(
        replace(
            record,
            prompt=planned.prompt,
            answer=read_answer(events),
            envelope=read_envelope(events),
            other_choices=tuple(read_answer(events, choice) for choice in range(1, planned.choices)),
        )
        for planned, (record, events) in zip(requests, sent, strict=True)
    )
    ended = max((record.start + record.e2el for record in records), default=0.0)
    began = min((record.start for record in records), default=0.0)
    return OpenLoopResult(
        began=origin,
        duration=ended - began,
        requests=tuple(requests),
        records=records,
        steps_by_running=steps_by_running(before, after, endpoint.series),
        generation_tokens=difference(before, after, endpoint.series.generation_tokens),
        preemptions=preemptions(before, after, endpoint.series),
        model=endpoint.model,
        began_at=began_at,
    )


def timed_request(endpoint: Endpoint, planned: PlannedRequest) -> TimedRequest:
    return TimedRequest(
        endpoint.base_url + planned.route,
        json.dumps(body_of(endpoint, planned)).encode(),
        None if planned.may_end_early else planned.choices * planned.output_len,
        keeps_events=True,
        abort_after=planned.abort_after,
        is_streamed=planned.is_streamed,
        choices=planned.choices,
    )


def body_of(endpoint: Endpoint, planned: PlannedRequest) -> Body:
    """Return the body of one request."""
    body = streamed_body(
        endpoint, _prompt_of(planned), planned.output_len, planned.temperature, keeps_answer=True
    )
    if not planned.is_streamed:
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return {**body, **_own_fields(planned)}


def _prompt_of(planned: PlannedRequest) -> Body:
    if not planned.messages:
        return {"prompt": list(planned.prompt) if planned.text is None else planned.text}
    return {"messages": [{"role": role, "content": content} for role, content in planned.messages]}


def _own_fields(planned: PlannedRequest) -> Body:
    """Return the fields of a request that its kind adds."""
    if planned.temperature:
        several = {"n": planned.choices} if planned.choices > 1 else {}
        # Whatever the model's maker would leave out of its distributions is judged, unless the request
        # leaves it out.
        return {"seed": planned.seed, **vars(planned.truncation), **several}
    if planned.kind == "stop":
        first, last = NEVER_SAID
        if planned.messages:
            # One stop string needs no list.
            return {"stop": planned.stop}
        return {"stop": [first, planned.stop, last]}
    if planned.kind == "end":
        bias = {str(planned.end_token): END_BIAS}
        return {"ignore_eos": False, "logit_bias": bias, "min_tokens": planned.min_tokens}
    if planned.kind == "repetition":
        assert planned.adjustments is not None
        return {"repetition_penalty": planned.adjustments.repetition_penalty}
    if planned.adjustments is not None:
        return {
            "presence_penalty": planned.adjustments.presence_penalty,
            "frequency_penalty": planned.adjustments.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in planned.adjustments.bias},
        }
    if planned.kind == "logprobs":
        return {"logprobs": True, "top_logprobs": LOGPROBS} if planned.messages else {"logprobs": LOGPROBS}
    return {}
