"""The plan of a load as in use: arrivals, lengths, kinds, shared prefixes, and what prompts cost together."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from statistics import fmean, variance

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.workload.drawing import lengths_within, poisson_times
from scalegate.serving_check.workload.planned_request import WHOLE
from scalegate.serving_check.workload.prompts import Slices
from scalegate.serving_check.workload.use_plan import (
    IN_CHATS,
    LEAST_GREEDY,
    LEAST_LONG_ANSWER,
    LEAST_PROMPT,
    LONGEST_SHARE,
    MEAN_ANSWER,
    RARE,
    SHARING,
    SPARE,
    TRUNCATIONS,
    TURNS,
    WITH_SYSTEM,
    Conversations,
    UseShape,
    plan_requests,
    stop_string,
)

KINDS = frozenset({"greedy", "sampled", *RARE})
SHAPE = UseShape(3.0, 2.0, 60.0, 20_000, 900, 2048, KINDS, end_token=0)
TEXT = random.Random(1).choices(range(1, 8000), k=20_000)
ANSWERED = [
    (TEXT[start : start + 32], f"the answer after {start} and its end") for start in range(0, 1600, 100)
]
OPENING = [9001, 9002, 9003]
"""Of each message, by the template of these tests; the answer begins after one more."""


def encode_chat(messages):
    return [token for _, content in messages for token in [*OPENING, *map(ord, content)]] + OPENING


CONVERSATIONS = Conversations(lambda ids: "".join(map(chr, ids)), encode_chat)


def planned(seed=0, shape=SHAPE):
    return plan_requests(seed, shape, TEXT, ANSWERED, CONVERSATIONS)


def test_a_plan_is_a_function_of_its_seed():
    assert planned() == planned()
    assert planned() != planned(seed=1)
    times = [request.at for request in planned()]
    assert times == sorted(times) and 0 <= times[0] <= times[-1] < SHAPE.seconds


@pytest.mark.parametrize("rates", [(0.1, 0.2), (2.0, 60.0), (200.0, 10.0)])
def test_every_kind_is_in_every_block(rates):
    for seed in range(20):
        requests = planned(seed, replace(SHAPE, first_rate=rates[0], last_rate=rates[1]))
        counts = Counter(request.kind for request in requests)
        assert counts.keys() == KINDS
        if len(requests) > 30:
            assert counts["sampled"] == round(len(requests) / 3)
            assert counts["logprobs"] == round(len(requests) / 20) + 1
            assert counts["aborted"] == round(len(requests) / 20)


def test_one_of_each_kind_is_not_streamed_and_one_is_a_chat_where_both_servers_take_it():
    unstreamed, chats = Counter(), Counter()
    in_chats = frozenset(IN_CHATS) - {"end"}
    for seed in range(4):
        requests = planned(seed, replace(SHAPE, kinds_in_chats=in_chats))
        assert max(requests, key=lambda request: len(request.prompt)).is_streamed
        alone = [request for request in requests if not request.is_streamed]
        assert sorted(request.kind for request in alone) == sorted(KINDS - {"aborted"})
        unstreamed.update(request.kind for request in alone if request.messages)
        of_kinds = [request.kind for request in requests if request.messages and request.kind in IN_CHATS]
        assert sorted(of_kinds) == sorted(in_chats)
        chats.update(request.full_kind for request in requests if request.messages)
    # Every other time it is the chat.
    assert unstreamed == {**dict.fromkeys([*in_chats, "sampled"], 2), "chat": 4}
    assert {"unstreamed logprobs chat", "logprobs chat", "unstreamed chat", "sampled chat"} <= chats.keys()


def test_some_sampled_requests_are_chats_and_some_chats_have_a_system_message():
    with_system = replace(CONVERSATIONS, turns=(*TURNS, *WITH_SYSTEM))
    requests = [
        request for seed in range(5) for request in plan_requests(seed, SHAPE, TEXT, ANSWERED, with_system)
    ]
    sampled = [request for request in requests if request.kind == "sampled"]
    chats = [request for request in sampled if request.messages]
    assert sum(bool(request.messages) for request in sampled) == pytest.approx(len(sampled) / 4, abs=5)
    assert all(request.temperature and request.seed is not None for request in chats)
    assert all(request.prompt == tuple(encode_chat(request.messages)) for request in chats)
    roles = {tuple(role for role, _ in request.messages) for request in requests if request.messages}
    assert roles == {*TURNS, *WITH_SYSTEM}
    assert {roles[0] for request in planned() if (roles := [role for role, _ in request.messages])} == {
        "user"
    }


def test_kinds_that_cannot_be_asked_for_are_left_out():
    bare = plan_requests(0, replace(SHAPE, end_token=None), TEXT)
    assert {request.kind for request in bare} == KINDS - {"end", "chat", "stop"}
    few = plan_requests(0, replace(SHAPE, kinds=frozenset({"greedy", "chat"})), TEXT, ANSWERED, CONVERSATIONS)
    assert {request.kind for request in few} == {"greedy", "chat"}


def test_arrivals_are_a_poisson_process_whose_rate_rises_linearly():
    runs = 400
    halves = [
        Counter(at < 1.0 for at in poisson_times(random.Random(seed), 2.0, 10.0, 50.0, least=0))
        for seed in range(runs)
    ]
    # Integrals of 10 + 20 t. Five standard errors of a mean of Poisson counts, and of their variance.
    for is_first, expected in ((True, 20.0), (False, 40.0)):
        counts = [half[is_first] for half in halves]
        assert fmean(counts) == pytest.approx(expected, abs=5 * math.sqrt(expected / runs))
        error = math.sqrt(2 / (runs - 1) + 1 / (runs * expected))
        assert variance(counts) / expected == pytest.approx(1.0, abs=5 * error)


def test_a_quiet_block_is_filled_up_from_the_same_density():
    times = poisson_times(random.Random(0), 1.0, 0.0, 0.01, least=4000)
    assert len(times) == 4000
    # The density is 2 t, whose mean is 2/3 and whose standard deviation is 1/sqrt(18).
    assert fmean(times) == pytest.approx(2 / 3, abs=5 / math.sqrt(18 * 4000))


def test_lengths_are_log_uniform_and_shorter_where_they_cannot_be_paid():
    lengths = sorted(lengths_within(10**9, random.Random(0), 50, 16, 1000))
    for index, length in enumerate(lengths):
        assert 16 * (1000 / 16) ** (index / 50) - 1 < length <= 16 * (1000 / 16) ** ((index + 1) / 50)
    cheap = lengths_within(5000, random.Random(0), 50, 16, 1000)
    # One more in the largest would exceed it at most by one token a length.
    assert 5000 - 50 <= sum(cheap) <= 5000
    assert set(lengths_within(0, random.Random(0), 5, 16, 1000)) == {16}


def test_answers_have_the_mean_that_rates_are_computed_from():
    requests = []
    for seed in range(20):
        block = planned(seed)
        # The longest prompt has a longer answer.
        longest = max(len(request.prompt) for request in block)
        requests += [
            request for request in block if not request.may_end_early and len(request.prompt) < longest
        ]
    lengths = [request.output_len for request in requests]
    # Each of a block's requests has a stratum of the logarithms, and the one of the longest may be left out.
    assert min(lengths) == 8 and 200 * (8 / 200) ** (2 / len(planned())) < max(lengths) <= 200
    # A log-uniform length has a variance of (b² - a²) / (2 ln(b/a)) - mean²; lengths are rounded down.
    deviation = math.sqrt((200**2 - 8**2) / (2 * math.log(200 / 8)) - MEAN_ANSWER**2)
    assert fmean(lengths) == pytest.approx(MEAN_ANSWER, abs=0.5 + 5 * deviation / math.sqrt(len(lengths)))


@pytest.mark.parametrize("prompt_tokens", [700, 3000, 20_000, 10**6])
@pytest.mark.parametrize("last_rate", [1.0, 60.0])
def test_prompts_are_paid_and_one_is_as_long_as_can_be(prompt_tokens, last_rate):
    shape = replace(SHAPE, prompt_tokens=prompt_tokens, last_rate=last_rate)
    for seed in range(10):
        requests = planned(seed, shape)
        lengths = [len(request.prompt) for request in requests]
        others = sum(lengths) - max(lengths)
        longest = min(shape.longest_prompt, int(prompt_tokens * LONGEST_SHARE), prompt_tokens - others)
        assert sum(lengths) <= prompt_tokens
        assert max(lengths) == longest and lengths.count(longest) == 1
        assert min(len(request.prompt) for request in requests if not request.messages) >= LEAST_PROMPT


def test_one_prompt_is_as_long_as_is_asked_for_and_has_an_answer_at_that_context():
    for seed in range(10):
        shape = replace(SHAPE, prompt_tokens=3000, long_prompt=1500)
        long, *others = sorted(planned(seed, shape), key=lambda request: -len(request.prompt))
        assert len(long.prompt) == 1500 and long.output_len >= LEAST_LONG_ANSWER
        assert sum(len(request.prompt) for request in others) <= 3000
        # What the context leaves no room for is not asked.
        [whole] = {max(len(request.prompt) for request in planned(seed, replace(shape, long_prompt=9999)))}
        assert whole == SHAPE.context - LEAST_LONG_ANSWER


def test_a_short_text_leaves_long_prompts_different_beginnings():
    for seed in range(10):
        requests = plan_requests(seed, replace(SHAPE, long_prompt=1900), TEXT[:2048], ANSWERED, CONVERSATIONS)
        assert max(len(request.prompt) for request in requests) == 1024


def test_prompts_begin_differently_but_for_those_that_share_half_or_more():
    for seed in range(10):
        groups = defaultdict(list)
        for request in planned(seed):
            if request.kind not in ("chat", "sampled"):
                groups[request.prompt[:8]].append(request)
        sharing = [group for group in groups.values() if len(group) > 1 and group[0].kind != "sampled"]
        assert sharing
        for group in sharing:
            assert len(group) == SHARING and {request.kind for request in group} == {"greedy"}
            first, *others = [request.prompt for request in group]
            for other in others:
                same = next(
                    i
                    for i in range(len(first) + 1)
                    if first[i : i + 1] != other[i : i + 1] or i == len(first)
                )
                assert len(first) / 2 <= same < len(first)


def test_a_sampled_prompt_comes_twice_with_one_seed_and_once_with_another():
    for seed in range(10):
        sampled = [request for request in planned(seed) if request.kind == "sampled"]
        prompts = Counter(request.prompt[:8] for request in sampled)
        assert sorted(prompts.values())[-2:] == [1, 3]
        alike = [request for request in sampled if prompts[request.prompt[:8]] == 3]
        first, second, third = alike
        assert first.seed == third.seed != second.seed and first.at < second.at < third.at
        plain = {replace(request, seed=0, at=0.0, is_streamed=True) for request in alike}
        assert plain == {replace(first, seed=0, at=0.0, is_streamed=True)}


@pytest.mark.parametrize("context", [128, 512])
def test_each_request_says_what_its_kind_needs_and_fits_in_the_context(context):
    for seed in range(10):
        for request in planned(seed, replace(SHAPE, context=context)):
            assert len(request.prompt) + request.output_len <= context
            assert request.output_len >= 8
            is_sampled = request.kind in ("sampled", "choices", "truncated")
            assert (request.temperature > 0) == (request.seed is not None) == is_sampled
            assert (request.choices > 1) == (request.kind == "choices")
            assert (request.truncation != WHOLE) == (request.kind == "truncated")
            is_adjusted = request.kind in ("adjusted", "repetition")
            assert (request.adjustments is not None) == is_adjusted
            assert (request.stop is not None) == (request.kind == "stop")
            assert (request.end_token is not None) == (request.kind == "end")
            if request.kind == "end":
                assert request.min_tokens == request.output_len - SPARE >= 8
            if request.kind == "aborted":
                assert 1 <= request.abort_after < request.output_len
            if request.messages:
                assert list(request.prompt) == encode_chat(request.messages)
    assert 1.0 in {request.temperature for request in planned() if request.kind == "sampled"}


def test_a_few_greedy_prompts_are_texts_that_the_tokenizer_makes_prompts_of():
    with_texts = replace(CONVERSATIONS, encode_text=lambda text: [1, *map(ord, text)])
    for seed in range(5):
        requests = plan_requests(seed, SHAPE, TEXT, ANSWERED, with_texts)
        texts = [request for request in requests if request.text is not None]
        assert len(texts) == 2 and {request.kind for request in texts} == {"greedy"}
        for request in texts:
            assert list(request.prompt) == [1, *map(ord, request.text)]
            assert len(request.prompt) + request.output_len <= SHAPE.context
            assert len(request.prompt) < max(len(other.prompt) for other in requests)
    assert all(request.text is None for request in planned())


@pytest.mark.parametrize("seconds", [0.1, 1.0, 1.4, 2.0, 3.0, 8.0])
def test_however_many_requests_come_some_are_greedy_and_some_share_a_prefix(seconds):
    for seed in range(20):
        requests = planned(seed, replace(SHAPE, seconds=seconds, first_rate=10.0, last_rate=20.0))
        kinds = Counter(request.kind for request in requests)
        assert kinds.keys() == KINDS and kinds["greedy"] >= LEAST_GREEDY
        assert min(kinds[kind] for kind in KINDS - {"aborted"}) >= 2


def test_three_blocks_have_each_truncation():
    blocks = [planned(seed) for seed in range(7, 10)]
    asked = {request.truncation for block in blocks for request in block if request.kind == "truncated"}
    assert asked == set(TRUNCATIONS)


def test_one_sampled_prompt_comes_with_one_seed_twice_and_with_another():
    for seed in range(10):
        sampled = [request for request in planned(seed) if request.kind == "sampled" and not request.messages]
        drawn = Counter((request.prompt, request.seed, request.temperature) for request in sampled)
        assert sorted(drawn.values(), reverse=True)[:2] == [2, 1]
        prompts = Counter(prompt for prompt, _, _ in drawn)
        assert sorted(prompts.values(), reverse=True)[:2] == [2, 1]
        (twice,) = (prompt for (prompt, _, _), count in drawn.items() if count == 2)
        assert (
            len({(request.temperature, request.output_len) for request in sampled if request.prompt == twice})
            == 1
        )
        assert prompts[twice] == 2 and len(twice) == min(len(request.prompt) for request in sampled)
        first, last = sampled[0], sampled[-1]
        assert first.prompt == twice and first == replace(last, at=first.at), "beside few and beside many"


def test_the_bias_is_against_the_tokens_that_the_text_has_most():
    text = [1, 2, 3, 4] * 100 + [5] * 1000 + list(range(6, 1000))
    [request] = [request for request in plan_requests(0, SHAPE, text) if request.kind == "adjusted"][:1]
    tokens = [token for token, _ in request.adjustments.bias]
    assert tokens[:5] == [5, 1, 2, 3, 4] and {bias for _, bias in request.adjustments.bias} == {-5.0}


def test_a_stop_string_comes_from_the_middle_of_an_answer():
    stop = stop_string("the answer after 100 and its end")
    assert stop == " 100 and"
    prompts = {tuple(prompt): answer for prompt, answer in ANSWERED}
    for request in planned():
        if request.kind == "stop":
            assert request.stop in prompts[request.prompt]
    assert stop_string("short") is None
    assert stop_string("before" + " " * 20 + "after") is None
    assert stop_string("eight or more \N{REPLACEMENT CHARACTER} eight or more") is None


def test_a_text_too_short_for_different_prompts_is_named():
    slices = Slices(random.Random(0), [1, 2, 3, 4, 5], 2, others=[[2, 3]])
    assert {tuple(slices.cut(2)) for _ in range(3)} == {(1, 2), (3, 4), (4, 5)}
    with pytest.raises(UserError, match="give a longer text"):
        slices.cut(2)
