"""The open loop on real servers: when requests are sent, how each kind ends, what servers do not take."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.checks.canary import continuations
from scalegate.serving_check.evidence.answer_figures import TokenText
from scalegate.serving_check.evidence.as_asked import not_as_asked
from scalegate.serving_check.workload.kinds_taken import (
    draws_choices_apart,
    heeds_repetition_penalty,
    kinds_taken,
)
from scalegate.serving_check.workload.open_loop import run_open_loop
from scalegate.serving_check.workload.planned_request import PlannedRequest
from scalegate.serving_check.workload.use_plan import IN_CHATS, RARE, Conversations, UseShape, plan_requests
from transformers import AutoTokenizer

KINDS = frozenset({"greedy", "sampled", *RARE})
END = 0
"""The end-of-sequence token of the bundled checkpoint."""
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint):
    return AutoTokenizer.from_pretrained(chat_checkpoint)


@pytest.fixture(scope="module")
def token_text(tokenizer):
    return TokenText(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
    )


@pytest.fixture(scope="module")
def result(server, tokenizer, token_text, heldout_text):
    """One block of some thirty requests."""
    documents = [json.loads(line)["text"] for line in heldout_text.read_text(encoding="utf-8").splitlines()]
    text = token_text.encode("\n".join(documents)[:40_000])

    def chat(messages):
        dicts = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)

    prompts = [text[start : start + 32] for start in range(0, 3200, 400)]
    answered = [(each.prompt, each.text) for each in continuations(server, prompts, 32, token_text.encode)]
    shape = UseShape(1.0, 5.0, 60.0, 4000, 400, 512, KINDS, frozenset(IN_CHATS), END)
    requests = plan_requests(3, shape, text, answered, Conversations(token_text.decode, chat))
    return run_open_loop(server, requests, TIMEOUT)


def of_kind(result, kind):
    pairs = zip(result.requests, result.records, strict=True)
    found = [(planned, record) for planned, record in pairs if planned.kind == kind]
    assert found
    return found


def test_every_kind_is_answered_as_asked(result, token_text):
    assert {planned.kind for planned in result.requests} == KINDS
    assert [record.error for record in result.records if record.error] == []
    assert not_as_asked(result, token_text) == ()
    assert result.steps_by_running and max(result.steps_by_running) > 1
    assert result.preemptions == 0
    assert 0 < result.duration < TIMEOUT


def test_requests_are_sent_at_their_times_with_their_prompts(result):
    for planned, record in zip(result.requests, result.records, strict=True):
        # A timer's resolution, of asyncio's clock.
        assert record.start >= planned.at - 0.02
        assert record.prompt == planned.prompt
        assert record.answer is not None and (record.ttft is not None) == planned.is_streamed
        assert record.envelope is not None and len(record.envelope.ids) == 1
        assert record.answer.model == result.model
        if planned.kind != "aborted":
            assert record.total_tokens == record.prompt_tokens + record.output_tokens


def test_token_ids_and_reasons_are_told(result):
    for planned, record in of_kind(result, "greedy") + of_kind(result, "sampled") + of_kind(result, "chat"):
        assert len(record.answer.token_ids) == record.output_tokens == planned.output_len
        assert record.answer.finish_reason == "length"
    for planned, record in of_kind(result, "end"):
        assert record.output_tokens == planned.min_tokens + 1
        assert record.answer.token_ids[-1] == END
        assert END not in record.answer.token_ids[:-1]
    for planned, record in of_kind(result, "logprobs"):
        assert len(record.answer.logprobs) == planned.output_len
        assert max(record.answer.logprobs) <= 0
        assert len(record.answer.alternatives) == planned.output_len
        for logprob, told in zip(record.answer.logprobs, record.answer.alternatives, strict=True):
            assert told.logprobs[told.chosen] == logprob == max(told.logprobs.values())
    for planned, record in of_kind(result, "chat"):
        assert record.prompt_tokens == len(planned.prompt)


def test_answers_that_are_not_streamed_tell_the_same(result):
    whole = [
        (planned, record)
        for planned, record in zip(result.requests, result.records, strict=True)
        if not planned.is_streamed
    ]
    assert {planned.kind for planned, _ in whole} == KINDS - {"aborted"}
    for planned, record in whole:
        assert record.arrivals == [] and record.first_token_s == record.e2el
        assert record.decoding == (record.start, record.start + record.e2el)
        assert record.answer.finish_reason and record.answer.token_ids
        assert len(record.other_choices) == planned.choices - 1
        assert all(choice.token_ids for choice in record.other_choices)


def test_all_choices_of_a_request_are_kept_and_the_first_is_timed(result):
    for planned, record in of_kind(result, "choices"):
        choices = [record.answer, *record.other_choices]
        assert [len(choice.token_ids) for choice in choices] == [planned.output_len] * 3
        assert len({tuple(choice.token_ids) for choice in choices}) == 3
        assert record.output_tokens == 3 * planned.output_len
        assert planned.is_streamed == bool(record.arrivals)
        assert len(record.arrivals) <= planned.output_len, "one chunk may have several tokens"


def test_an_aborted_request_ends_at_its_chunk_and_is_no_error(result):
    for planned, record in of_kind(result, "aborted"):
        assert record.error is None and record.output_tokens == 0
        assert len(record.arrivals) == planned.abort_after
        assert 1 <= len(record.answer.token_ids) < planned.output_len


def test_a_stop_string_ends_an_answer_before_it(server, token_text, result):
    planned, _ = of_kind(result, "greedy")[0]
    whole = run_open_loop(server, [replace(planned, output_len=40)], TIMEOUT).records[0].answer.text
    middle = next(at for at in range(len(whole) // 2, len(whole)) if not whole[at].isspace())
    stop = whole[middle : middle + 6]
    asked = PlannedRequest(0.0, "stop", planned.prompt, 40, stop=stop)
    stopped = run_open_loop(server, [asked], TIMEOUT)
    assert stopped.records[0].answer.text == whole[: whole.index(stop)]
    assert stopped.records[0].answer.finish_reason == "stop"
    assert not_as_asked(stopped, token_text) == ()
    ignored = run_open_loop(server, [replace(planned, output_len=40)], TIMEOUT)
    assert not_as_asked(replace(ignored, requests=(asked,)), token_text)


def test_our_server_takes_every_kind(server):
    taken = kinds_taken(server, END, has_template=True)
    assert (taken.kinds, taken.in_chats, taken.unknown) == (KINDS, frozenset(IN_CHATS), ())
    left = taken.without("stop", "why")
    assert (left.kinds, left.unknown) == (KINDS - {"stop"}, ("why",)) and "stop" not in left.in_chats
    bare = kinds_taken(server, None, has_template=False)
    assert bare.kinds == KINDS - {"end", "chat"}
    assert bare.unknown == (
        "the tokenizer has no chat template for plain conversations",
        "the model has no end-of-sequence token",
    )


@pytest.mark.parametrize(("seen", "heeds"), [(2, True), (20, False)])
def test_a_server_heeds_a_penalty_if_it_changes_the_first_token_after_some_prompt(seen, heeds):
    """Here after the prompts from the third on, or after none of those that are asked."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["max_tokens"] == 1
        changes = body["repetition_penalty"] > 1 and body["prompt"][0] >= seen
        return web.json_response({"choices": [{"text": "b" if changes else "a"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    prompts = [(first, 1) for first in range(30)]
    assert served(app, lambda endpoint: heeds_repetition_penalty(endpoint, prompts)) == heeds


@pytest.mark.parametrize(("texts", "apart"), [("ab", True), ("aa", False), ("a", True)])
def test_choices_are_asked_for_only_where_a_seed_does_not_make_them_equal(texts, apart):
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": text} for text in texts]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    assert served(app, lambda endpoint: draws_choices_apart(endpoint, (1, 2))) == apart


@pytest.mark.parametrize("takes_lists", [True, False])
def test_half_of_the_canary_prompts_are_a_list_where_a_server_takes_lists(takes_lists):
    """Choices come in any order, and belong to the prompt of their index."""

    async def complete(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        if not isinstance(prompt[0], list):
            return web.json_response({"choices": [{"text": str(prompt[0]), "index": 0}]})
        if not takes_lists:
            return web.json_response({}, status=422)
        choices = [{"text": str(ids[0]), "index": at} for at, ids in enumerate(prompt)]
        return web.json_response({"choices": choices[::-1]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    prompts = [(first, 1) for first in range(5)]
    found = served(app, lambda endpoint: continuations(endpoint, prompts, 4, lambda text: [1]))
    assert [continuation.text for continuation in found] == list("01234")


def served(app, work):
    """What `work` gives, in a thread, with the URL of `app`."""

    async def run():
        async with TestServer(app) as server:
            endpoint = Endpoint(str(server.make_url("")).rstrip("/"), "m")
            with ThreadPoolExecutor(1) as pool:
                return await asyncio.get_running_loop().run_in_executor(pool, work, endpoint)

    return asyncio.run(run())


def test_what_a_server_refuses_is_left_out_and_named():
    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        refused = "min_tokens" in body or "top_k" in body
        return web.json_response({}, status=422 if refused else 500)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    taken = served(app, lambda endpoint: kinds_taken(endpoint, END, has_template=True))
    assert taken.kinds == KINDS - {"sampled", "choices", "truncated", "chat", "end"}
    assert taken.unknown == (
        "the server does not take seed, top_k or min_p",
        "the server does not take chat requests",
        "the server does not take logit_bias or min_tokens",
        "the server does not take n with seed, top_k or min_p",
        "the server does not take top_k, top_p or min_p",
    )


def test_no_request_waits_for_an_earlier_one():
    """This server answers nobody before all have come, each on a connection of its own."""
    count = 8
    arrived: set[object] = set()
    all_there = asyncio.Event()

    async def complete(request: web.Request) -> web.Response:
        arrived.add(request.transport)
        if len(arrived) == count:
            all_there.set()
        await all_there.wait()
        return web.Response(status=503, text="as planned")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    requests = [PlannedRequest(0.01 * at, "greedy", (1, 2), 4) for at in range(count)]
    result = served(app, lambda endpoint: run_open_loop(endpoint, requests, 10.0))
    assert [record.error for record in result.records] == ["HTTP 503: as planned"] * count
    assert result.steps_by_running is None and result.generation_tokens is None
