"""The workload generator against real servers: what it counts, what is an error, and what M really was."""

import asyncio
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scalegate.base.errors import UserError
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.workload import (
    RequestRecord,
    WorkloadResult,
    WorkloadSpec,
    percentile,
    run_workload,
)
from scalegate.serving_check.workload.generator import run_workload_async
from scalegate.serving_check.workload.prompts import prompts
from transformers import AutoTokenizer

COUNTING_SERVER = Path(__file__).parents[1] / "counting_server.py"


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A server whose engine takes 5 ms a step however many decode."""
    log = tmp_path_factory.mktemp("counting") / "log.txt"
    with SubprocessEndpoint([sys.executable, "-P", str(COUNTING_SERVER), "0.005"], "c", log=log) as endpoint:
        yield endpoint


def test_a_closed_loop_reaches_its_concurrency_and_loses_nothing(counting):
    spec = WorkloadSpec(m=8, num_requests=24, input_len=16, output_len=40)
    result = run_workload(counting, spec)
    assert result.errors == []
    assert result.output_tokens == 24 * 40
    assert all(record.prompt_tokens == 16 for record in result.requests)
    assert 6 < result.running_mean <= 8
    steps = result.steps_by_running
    assert steps is not None and max(steps) == 8
    assert sum(running * count for running, count in steps.items()) == 24 * 40
    assert result.samples and max(sample.running for sample in result.samples) == 8
    assert 0.9 * 3 * 40 * 0.005 < result.duration < 10
    assert result.output_throughput == pytest.approx(24 * 40 / result.duration)


def test_latencies_are_those_of_the_engine(counting):
    result = run_workload(counting, WorkloadSpec(m=2, num_requests=4, input_len=8, output_len=50))
    for record in result.requests:
        assert record.tpot == pytest.approx((record.e2el - record.ttft) / 49)
        # Not `tpot`: a first token that a busy client reads late makes the others look closer.
        assert record.e2el > 50 * 0.005
        assert record.ttft > 0.005
        assert sum(record.itls) <= record.e2el - record.ttft + 1e-6
        assert 40 <= len(record.itls) <= 49
    assert percentile(result.tpots, 50) < 0.05


def test_the_real_engine_is_loaded_at_full_concurrency(server):
    spec = WorkloadSpec(m=16, num_requests=32, input_len=24, output_len=24, vocab_size=8000)
    result = run_workload(server, spec)
    assert result.errors == []
    assert result.output_tokens == 32 * 24
    assert max(result.steps_by_running) == 16
    assert percentile(result.tpots, 50) <= percentile(result.tpots, 99)
    assert result.output_throughput > 0


def test_what_streams_said_is_kept_where_it_is_asked_for(server, chat_checkpoint):
    spec = WorkloadSpec(m=4, num_requests=4, input_len=8, output_len=12, keep_answers=True, vocab_size=8000)
    tokenizer = AutoTokenizer.from_pretrained(chat_checkpoint)
    result = run_workload(server, spec)
    assert [list(record.prompt) for record in result.requests] == list(itertools.islice(prompts(spec), 4))
    for record in result.requests:
        assert len(record.answer.token_ids) == 12
        assert tokenizer.decode(record.answer.token_ids, skip_special_tokens=True) == record.answer.text
    assert result.engine.generation_tokens == 48
    silent = run_workload(server, replace(spec, keep_answers=False))
    assert {record.answer for record in silent.requests} == {None}


def test_a_refusal_is_recorded_with_the_servers_words(counting):
    result = run_workload(counting, WorkloadSpec(m=2, num_requests=2, input_len=4090, output_len=10))
    assert len(result.errors) == 2
    assert "HTTP 400: the prompt has 4090 tokens" in result.errors[0]
    assert result.output_tokens == 0 and result.tpots == []


def test_a_server_that_is_gone_is_an_error_for_each_request():
    spec = WorkloadSpec(m=2, num_requests=3, input_len=4, output_len=4)
    result = run_workload(Endpoint("http://127.0.0.1:9", "m"), spec)
    assert len(result.errors) == 3
    assert result.steps_by_running is None and result.running_mean is None


CHUNK = b'data: {"choices":[{"index":0,"text":"a \\"usage\\": {"}]}'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}'
DONE = b"data: [DONE]"


@pytest.mark.parametrize(
    ("parts", "error", "chunks"),
    [
        ([CHUNK, CHUNK, CHUNK, USAGE, DONE], None, 3),
        ([CHUNK, USAGE.replace(b"3}", b"2}"), DONE], "asked for 3 tokens, usage says 2", 1),
        ([CHUNK, DONE], "the stream carried no usage", 1),
        ([CHUNK, CHUNK, USAGE], "the stream ended without [DONE]", 2),
        ([CHUNK, b'data: {"error": {"message": "the engine has died"}}', DONE], "the engine has died", 1),
    ],
)
@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
def test_streams_of_any_server_are_read_alike(parts, error, chunks, ending):
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = ending.join(parts) + ending
        for start in range(0, len(body), 7):
            await response.write(body[start : start + 7])
        return response

    async def load() -> WorkloadResult:
        app = web.Application()
        app.router.add_post("/v1/completions", stream)
        async with TestServer(app) as server:
            spec = WorkloadSpec(m=1, num_requests=1, input_len=4, output_len=3)
            return await run_workload_async(Endpoint(str(server.make_url("")).rstrip("/"), "m"), spec)

    result = asyncio.run(load())
    assert result.requests[0].error == error
    assert len(result.requests[0].itls) == max(chunks - 1, 0)


def test_prompts_are_reproducible_different_and_of_the_right_length():
    def first(count, **options):
        spec = WorkloadSpec(m=1, num_requests=1, output_len=1, **options)
        return list(itertools.islice(prompts(spec), count))

    for options in ({"vocab_size": 50}, {"token_pool": tuple(range(1000))}):
        some = first(200, input_len=12, seed=1, **options)
        assert some == first(200, input_len=12, seed=1, **options)
        assert all(len(prompt) == 12 for prompt in some)
        assert len({tuple(prompt) for prompt in some}) == 200
        assert some != first(200, input_len=12, seed=2, **options)
    with pytest.raises(UserError, match="give a longer text"):
        first(1, input_len=20, token_pool=(1, 2, 3))


def test_tpot_needs_two_tokens_and_no_error():
    record = RequestRecord(0.0, 1.0, (), 3.0, 5, 4)
    assert record.tpot == 0.5
    assert RequestRecord(0.0, 1.0, (), 3.0, 1, 4).tpot is None
    assert RequestRecord(0.0, 1.0, (), 3.0, 5, 4, "failed").tpot is None
    assert percentile([], 50) is None and percentile([3.0, 1.0, 2.0], 50) == 2.0
