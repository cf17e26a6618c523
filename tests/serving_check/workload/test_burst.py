"""A burst of tiny requests against the real server, and against one that refuses some."""

import time
from dataclasses import replace

import pytest
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.adapters.prometheus_text import total
from scalegate.serving_check.server.engine_child import STATS_INTERVAL
from scalegate.serving_check.workload.burst import (
    IN_FLIGHT,
    IN_TURN,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    leave_long_answers,
    send_burst,
)

pytestmark = pytest.mark.long

TEXT = tuple(range(300, 600))
SERIES = ("vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def metrics_at_rest(server: Endpoint):
    """The metrics once the requests that earlier tests left are gone and counted.

    The engine reports its counters every `STATS_INTERVAL`: what it said last may lack a request.
    """
    deadline = time.monotonic() + 30
    before: list[float | None] = []
    while time.monotonic() < deadline:
        metrics = server.metrics()
        now = [total(metrics, name) for name in SERIES]
        if now == before and now[0] == 0:
            return metrics
        before = now
        time.sleep(4 * STATS_INTERVAL)
    raise AssertionError(f"requests that earlier tests left still run: {before}")


def test_every_request_reaches_the_engine_and_is_answered(server: Endpoint):
    before = metrics_at_rest(server)
    result = send_burst(server, TEXT, 1, 100, 60.0)
    after = server.metrics()

    def rise(name: str) -> float:
        return (total(after, name) or 0.0) - (total(before, name) or 0.0)

    assert (result.requests, result.errors) == (100, ())
    assert rise("vllm:request_success_total") == 100
    assert rise("vllm:generation_tokens_total") == 100 * OUTPUT_TOKENS
    assert rise("vllm:prompt_tokens_total") == 100 * PROMPT_TOKENS


def test_requests_of_every_kind_are_answered_and_some_are_left(server: Endpoint):
    result = send_burst(server, TEXT, 1, 10 * len(IN_TURN), 60.0, IN_TURN)
    assert (result.requests, result.errors) == (10 * len(IN_TURN), ())


def test_all_chats_have_one_prompt_by_the_chat_template(server: Endpoint):
    before = total(metrics_at_rest(server), "vllm:prompt_tokens_total") or 0.0
    result = send_burst(server, TEXT, 1, 3, 60.0, ("chat",))
    tokens = (total(server.metrics(), "vllm:prompt_tokens_total") or 0.0) - before
    assert result.errors == ()
    assert tokens % 3 == 0 and tokens != 3 * PROMPT_TOKENS


def test_clients_of_long_answers_leave_after_the_first_chunk(server: Endpoint):
    before = metrics_at_rest(server)
    leave_long_answers(server, TEXT, 2, 64)
    after = metrics_at_rest(server)
    generated = [total(said, "vllm:generation_tokens_total") or 0.0 for said in (before, after)]
    assert 2 <= generated[1] - generated[0] < 2 * 64


def test_many_prompts_go_in_one_http_request(server: Endpoint):
    before = total(metrics_at_rest(server), "vllm:prompt_tokens_total") or 0.0
    result = send_burst(server, TEXT, 1, 64, 60.0, prompts_each=16)
    after = total(server.metrics(), "vllm:prompt_tokens_total") or 0.0
    assert (result.requests, result.errors) == (64, ())
    assert after - before == 64 * PROMPT_TOKENS


def test_no_request_is_sent_once_its_time_is_over(server: Endpoint):
    result = send_burst(server, TEXT, 1, 10_000, 0.2)
    assert IN_FLIGHT <= result.requests < 10_000
    assert result.errors == ()


def test_a_refusal_is_an_error_of_its_request(server: Endpoint):
    result = send_burst(replace(server, model="another"), TEXT, 1, 3, 60.0)
    assert len(result.errors) == 3
    assert all(error.startswith("HTTP 404") for error in result.errors)
