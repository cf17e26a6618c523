"""The workload generator: M clients in one process stream completions from a server and time the chunks.

It shares the machine with the server it measures, so it looks at bytes and parses almost no JSON.
"""

import asyncio
import gc
import itertools
import json
import re
import time
from dataclasses import replace

import aiohttp

from ..adapters.endpoint import Endpoint
from ..adapters.prometheus_text import by_label, parse_metrics, total
from ..adapters.series import Series
from .answers import read_answer
from .engine_work import EngineWork, difference
from .prompts import prompts
from .spec import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec

# In JSON a quote inside a string is escaped, so these match keys of the chunk and never its text.
_HAS_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_HAS_ERROR = re.compile(rb'"error"\s*:\s*\{')
_DONE = b"data: [DONE]"


def run_workload(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
    """Send `spec`'s requests to `endpoint` and wait for all answers; a failed one is recorded, not raised."""
    return asyncio.run(run_workload_async(endpoint, spec))


async def run_workload_async(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
    """`run_workload` inside a running event loop."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=spec.request_timeout)
    headers = endpoint.headers()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before = await _metrics(session, endpoint)
        samples: list[MetricsSample] = []
        # What is there already is not looked at again while the workload runs. Collecting it first would cost
        # 0.3 s with a model library imported, more than a short repeat itself.
        gc.freeze()
        start = time.perf_counter()
        sampler = asyncio.create_task(
            _sample_metrics(session, endpoint, spec.sample_interval, start, samples)
        )
        records = await _closed_loop(session, endpoint, spec, start)
        sampler.cancel()
        gc.unfreeze()
        after = await _metrics(session, endpoint)
    ended = max((record.start + record.e2el for record in records), default=0.0)
    began = min((record.start for record in records), default=0.0)
    return WorkloadResult(
        spec=spec,
        duration=ended - began,
        requests=tuple(records),
        samples=tuple(samples),
        steps_by_running=_steps_by_running(before, after, endpoint.series),
        preemptions=_whole(difference(before, after, endpoint.series.preemptions)),
        engine=EngineWork.between(before, after, endpoint.series),
        began=start,
    )


async def _closed_loop(
    session: aiohttp.ClientSession, endpoint: Endpoint, spec: WorkloadSpec, origin: float
) -> list[RequestRecord]:
    """Send the requests, at most `spec.m` at a time; their records in the order they were sent."""
    url = endpoint.base_url + "/v1/completions"
    asked = itertools.islice(prompts(spec), spec.num_requests)
    bodies = iter([(prompt, _body(endpoint, prompt, spec)) for prompt in asked])
    sent: list[tuple[RequestRecord, list[int], list[bytes]]] = []

    async def client() -> None:
        for prompt, body in bodies:
            record, events = await _send(session, url, body, spec, origin)
            sent.append((record, prompt, events))

    await asyncio.gather(*(client() for _ in range(min(spec.m, spec.num_requests))))
    records = [record for record, _, _ in sent]
    if spec.keep_answers:
        records = [
            replace(record, prompt=tuple(prompt), answer=read_answer(events))
            for record, prompt, events in sent
        ]
    return sorted(records, key=lambda record: record.start)


def _body(endpoint: Endpoint, prompt: list[int], spec: WorkloadSpec) -> bytes:
    body = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": spec.output_len,
        "temperature": spec.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.takes_repetition_penalty:
        # Answers are judged by the model's logits, and a penalty of its maker's would change them.
        body["repetition_penalty"] = 1.0
    if spec.keep_answers and endpoint.takes_return_token_ids:
        body["return_token_ids"] = True
    return json.dumps(body).encode()


async def _send(
    session: aiohttp.ClientSession, url: str, body: bytes, spec: WorkloadSpec, origin: float
) -> tuple[RequestRecord, list[bytes]]:
    """One request, streamed to its end, and the events with a choice where answers are kept."""
    sent = time.perf_counter()
    stamps: list[float] = []
    kept: list[bytes] = []
    usage: dict[str, int] = {}
    error = None
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {_message(await response.read())}"
            else:
                usage, error = await _read_stream(response, stamps, kept if spec.keep_answers else None)
    except TimeoutError:
        error = f"no end within {spec.request_timeout:.3g} s"
    except aiohttp.ClientError as exception:
        error = f"{type(exception).__name__}: {exception}"
    ended = time.perf_counter()
    output_tokens = usage.get("completion_tokens", 0)
    if error is None and output_tokens != spec.output_len:
        error = f"asked for {spec.output_len} tokens, usage says {output_tokens}"
    record = RequestRecord(
        start=sent - origin,
        ttft=stamps[0] - sent if stamps else None,
        itls=tuple(later - earlier for earlier, later in itertools.pairwise(stamps)),
        e2el=ended - sent,
        output_tokens=output_tokens,
        prompt_tokens=usage.get("prompt_tokens", 0),
        error=error,
    )
    return record, kept


async def _read_stream(
    response: aiohttp.ClientResponse, stamps: list[float], kept: list[bytes] | None
) -> tuple[dict[str, int], str | None]:
    """Note the time of every event with a choice; return the usage and what went wrong, if anything did.

    kept: gets those events, unless it is None
    """
    usage: dict[str, int] = {}
    pending = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if _HAS_CHOICE.search(event):
                stamps.append(now)
                if kept is not None:
                    kept.append(event)
            elif event.startswith(_DONE):
                return usage, None if usage else "the stream carried no usage"
            elif _HAS_ERROR.search(event):
                return usage, _message(event.removeprefix(b"data: "))
            if _HAS_USAGE.search(event):
                usage = json.loads(event.removeprefix(b"data: "))["usage"]
    return usage, "the stream ended without [DONE]"


def _message(body: bytes) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever else was sent."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


async def _sample_metrics(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    interval: float,
    start: float,
    into: list[MetricsSample],
) -> None:
    while interval > 0:
        await asyncio.sleep(interval)
        samples = await _metrics(session, endpoint)
        into.append(
            MetricsSample(
                time=time.perf_counter() - start,
                running=total(samples, endpoint.series.running),
                waiting=total(samples, endpoint.series.waiting),
                kv_cache_usage=total(samples, endpoint.series.kv_cache_usage),
            )
        )


async def _metrics(session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, float]:
    """`/metrics`, or nothing where the server has none: an engine can be measured without."""
    try:
        async with session.get(endpoint.base_url + "/metrics") as response:
            return parse_metrics(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return {}


def _steps_by_running(
    before: dict[str, float], after: dict[str, float], series: Series
) -> dict[int, int] | None:
    counted = by_label(after, series.steps_by_running, "running")
    if not counted:
        return None
    earlier = by_label(before, series.steps_by_running, "running")
    steps = {int(running): int(count - earlier.get(running, 0)) for running, count in counted.items()}
    return {running: count for running, count in sorted(steps.items()) if count > 0 and running > 0}


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)
