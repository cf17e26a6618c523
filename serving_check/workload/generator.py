"""The workload generator: M clients in one process, each sending its next request when its last has ended.

`sending.py` times one request, and `open_loop.py` sends requests at given times.
"""

import asyncio
import gc
import itertools
import json
import time
from dataclasses import replace

import aiohttp

from ..adapters.endpoint import Endpoint
from ..adapters.prometheus_text import total
from .answers import read_answer
from .engine_work import EngineWork, preemptions, steps_by_running
from .prompts import prompts
from .sending import TimedRequest, read_metrics, send_request, streamed_body
from .spec import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec


def run_workload(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
    """Send `spec`'s requests to `endpoint` and wait for all answers; a failed request is recorded, not
    raised.
    """
    return asyncio.run(run_workload_async(endpoint, spec))


async def run_workload_async(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
    """Run `run_workload` inside a running event loop."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=spec.request_timeout)
    headers = endpoint.headers()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before = await read_metrics(session, endpoint)
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
        after = await read_metrics(session, endpoint)
    ended = max((record.start + record.e2el for record in records), default=0.0)
    began = min((record.start for record in records), default=0.0)
    return WorkloadResult(
        spec=spec,
        duration=ended - began,
        requests=tuple(records),
        samples=tuple(samples),
        steps_by_running=steps_by_running(before, after, endpoint.series),
        preemptions=preemptions(before, after, endpoint.series),
        engine=EngineWork.between(before, after, endpoint.series),
        began=start,
    )


async def _closed_loop(
    session: aiohttp.ClientSession, endpoint: Endpoint, spec: WorkloadSpec, origin: float
) -> list[RequestRecord]:
    """Send the requests, at most `spec.m` at a time; return their records in the order in which they were
    sent.
    """

    def streamed(prompt: list[int]) -> TimedRequest:
        body = streamed_body(
            endpoint, {"prompt": prompt}, spec.output_len, spec.temperature, spec.keep_answers
        )
        return TimedRequest(url, json.dumps(body).encode(), spec.output_len, spec.keep_answers)

    url = endpoint.base_url + "/v1/completions"
    asked = itertools.islice(prompts(spec), spec.num_requests)
    requests = iter([(prompt, streamed(prompt)) for prompt in asked])
    sent: list[tuple[RequestRecord, list[int], list[bytes]]] = []

    async def client() -> None:
        for prompt, request in requests:
            record, events = await send_request(session, request, origin)
            sent.append((record, prompt, events))

    await asyncio.gather(*(client() for _ in range(min(spec.m, spec.num_requests))))
    records = [record for record, _, _ in sent]
    if spec.keep_answers:
        records = [
            replace(record, prompt=tuple(prompt), answer=read_answer(events))
            for record, prompt, events in sent
        ]
    return sorted(records, key=lambda record: record.start)


async def _sample_metrics(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    interval: float,
    start: float,
    into: list[MetricsSample],
) -> None:
    while interval > 0:
        await asyncio.sleep(interval)
        samples = await read_metrics(session, endpoint)
        into.append(
            MetricsSample(
                time=time.perf_counter() - start,
                running=total(samples, endpoint.series.running),
                waiting=total(samples, endpoint.series.waiting),
                kv_cache_usage=total(samples, endpoint.series.kv_cache_usage),
            )
        )
