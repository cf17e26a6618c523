"""Faults in what a server makes of a request's fields, and in what it says beside the text.

Only a load as in use shows them, since all other requests set few fields. `servers_in_use.py` has the faults
of contexts, batches and speed that only such a load shows.
"""

import itertools
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from scalegate.serving_check.engine.request import MOST_BIAS, SamplingParams, TokenLogprobs
from scalegate.serving_check.server.generation import Generation
from scalegate.serving_check.server.text import StopStrings

from .server_fault import Deltas, M, Traffic
from .servers_in_use import FEW_TOKENS, before_answering, hidden

Events = AsyncIterator[bytes]
STARTED = int(time.time())


# What a request asks for, before the engine gets it.


@hidden("params", "no failed requests", "usage says")
def one_token_more_than_asked(asked: SamplingParams) -> SamplingParams:
    return replace(asked, max_tokens=asked.max_tokens + 1)


@hidden("params", "text in use", "with penalties and a bias")
def presence_penalty_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, presence_penalty=0.0)


@hidden("params", "text in use", "with penalties and a bias")
def frequency_penalty_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, frequency_penalty=0.0)


@hidden("params", "text in use", "with a repetition penalty")
def repetition_penalty_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, repetition_penalty=1.0)


@hidden("params", "text in use", "sampled with top-k, top-p or min-p")
def top_k_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, top_k=0)


@hidden("params", "text in use", "sampled with top-k, top-p or min-p")
def top_p_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, top_p=1.0)


@hidden("params", "text in use", "sampled with top-k, top-p or min-p")
def min_p_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, min_p=0.0)


@hidden("params", "text in use", "with penalties and a bias")
def small_biases_ignored(asked: SamplingParams) -> SamplingParams:
    """All but those that force a token or forbid it."""
    kept = tuple((token, bias) for token, bias in asked.logit_bias if abs(bias) == MOST_BIAS)
    return replace(asked, logit_bias=kept)


# Around a request.


@hidden("request", "sampling", "further choices of a request equal an earlier one")
@before_answering
def one_seed_for_all_choices(traffic: Traffic, generation: Generation) -> None:
    generation._params = [generation._params[0] for _ in generation._params]


@hidden("request", "answers as asked", "its stop string is in the text")
@before_answering
def only_the_first_stop_string(traffic: Traffic, generation: Generation) -> None:
    keep_stop_strings(generation, slice(1))


@hidden("request", "answers as asked", "its stop string is in the text")
@before_answering
def only_the_last_stop_string(traffic: Traffic, generation: Generation) -> None:
    keep_stop_strings(generation, slice(-1, None))


def keep_stop_strings(generation: Generation, kept: slice) -> None:
    for text in generation._texts:
        text._stops = StopStrings(text._stops._stops[kept])


@hidden("request", "answers as asked", "seed")
@before_answering
def seeds_ignored_beside_many_requests(traffic: Traffic, generation: Generation) -> None:
    if traffic.open >= M:
        generation._params = [replace(params, seed=None) for params in generation._params]


@hidden("request", "answers as asked", "tokens, the stream has")
async def longer_answers_than_usage_says(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    asked = [params.max_tokens for params in generation._params]
    generation._params = [
        replace(params, max_tokens=params.max_tokens + FEW_TOKENS) for params in generation._params
    ]
    async for some in deltas():
        for text, most in zip(generation._texts, asked, strict=True):
            text.tokens = min(text.tokens, most)
        yield some


@hidden("request", "answers as asked", "prompt tokens, the one sent has")
@before_answering
def prompt_tokens_counted_once_too_often(traffic: Traffic, generation: Generation) -> None:
    generation.prompt_tokens += 1


# Around a stream, on its way to the client.


@hidden("stream", "sampling", "choices of one request are mixed up")
async def choices_mixed_up(traffic: Traffic, deltas: Deltas) -> Deltas:
    """Of each two deltas of several choices, every other time one comes in the other's place."""
    odd = False
    async for some in deltas:
        odd = not odd
        if odd and len(some) > 1 and not any(delta.finish_reason for delta in some):
            first, second, *rest = some
            some = [replace(second, index=first.index), replace(first, index=second.index), *rest]
        yield some


@hidden("stream", "answers as asked", "choices have an end")
async def only_the_first_choice(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield [delta for delta in some if delta.index == 0]


@hidden("stream", "log-probabilities", "those of the most likely ones are")
async def alternatives_of_the_token_before(traffic: Traffic, deltas: Deltas) -> Deltas:
    """The chosen token has its own log-probability among them."""
    last: tuple[tuple[int, float], ...] = ()
    async for some in deltas:
        changed = []
        for delta in some:
            told = []
            for token, own in zip(delta.token_ids, delta.logprobs, strict=False):
                top = ((token, own.logprob), *(last or own.top)[1:])
                last = own.top
                told.append(replace(own, top=top))
            changed.append(replace(delta, logprobs=told))
        yield changed


@hidden("stream", "log-probabilities", "those of the most likely ones are")
async def names_of_alternatives_mixed_up(traffic: Traffic, deltas: Deltas) -> Deltas:
    """Those of all but the chosen token, each of which has the log-probability of its neighbour."""
    async for some in deltas:
        yield [replace(delta, logprobs=[with_names_moved(own) for own in delta.logprobs]) for delta in some]


def with_names_moved(own: TokenLogprobs) -> TokenLogprobs:
    (first, *others), logprobs = [token for token, _ in own.top], [logprob for _, logprob in own.top]
    return replace(own, top=tuple(zip([first, *others[1:], *others[:1]], logprobs, strict=True)))


@hidden("stream", "answers as asked", "alternatives are told at")
async def fewer_alternatives_than_asked(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield [
            replace(delta, logprobs=[replace(own, top=own.top[:2]) for own in delta.logprobs])
            for delta in some
        ]


# Around the events of a stream.


@hidden("events", "answers as asked", "tokens in all, with")
async def totals_without_the_prompt(events: Events) -> Events:
    async for some in events:
        yield re.sub(rb'("completion_tokens":(\d+),"total_tokens":)\d+', rb"\1\2", some)


@hidden("events", "answers as asked", "the answer says it is of")
async def another_model_in_the_answer(events: Events) -> Events:
    async for some in events:
        yield some.replace(b'"model":"', b'"model":"another/')


def in_events(pattern: bytes, change: Callable[[re.Match[bytes]], bytes]) -> Callable[[Events], Events]:
    """Changes whatever matches in all events of a stream."""

    async def changed(events: Events) -> Events:
        async for some in events:
            yield re.sub(pattern, change, some)

    return changed


@hidden("events", "answers as asked", "id: one answer has")
def another_id_in_every_chunk(events: Events) -> Events:
    count = itertools.count()
    return in_events(rb'"id":"', lambda found: found[0] + b"%d-" % next(count))(events)


@hidden("events", "answers as asked", "answers have the same")
def one_id_for_all_answers(events: Events) -> Events:
    return in_events(rb'"id":"[^"]*"', lambda found: b'"id":"cmpl-1"')(events)


@hidden("events", "answers as asked", "created: one answer has")
def another_time_in_every_chunk(events: Events) -> Events:
    count = itertools.count()
    return in_events(rb'"created":(\d+)', lambda found: b'"created":%d' % (int(found[1]) + next(count)))(
        events
    )


@hidden("events", "answers as asked", "created: the times do not follow")
def created_when_the_server_was(events: Events) -> Events:
    return in_events(rb'"created":\d+', lambda found: b'"created":%d' % STARTED)(events)


@hidden("events", "answers as asked", "created: the times do not follow")
def created_in_milliseconds(events: Events) -> Events:
    """Only in streams: other answers have their times in seconds."""
    return in_events(rb'"created":\d+', lambda found: found[0] + b"000")(events)


@hidden("events", "answers as asked", "object: an answer is")
def chunks_called_whole_answers(events: Events) -> Events:
    return in_events(rb'"chat.completion.chunk"', lambda found: b'"chat.completion"')(events)


@hidden("events", "answers as asked", "role: a chat's answer begins with None")
def no_role(events: Events) -> Events:
    return in_events(rb'"role":"assistant",', lambda found: b"")(events)


@hidden("events", "answers as asked", "choices: 1 were asked for")
def one_choice_too_many(events: Events) -> Events:
    more = b'[{"index":9,"text":"","logprobs":null,"finish_reason":null},'
    return in_events(rb'"choices":\[(?={)', lambda found: b'"choices":' + more)(events)
