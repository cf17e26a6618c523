"""Faults in what a server makes of a request's fields, and in what it says beside the text.

Only a load as in use shows them, since all other requests set few fields. `servers_in_use.py` has the faults
of contexts, batches and speed that only such a load shows.
"""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.server.generation import Generation
from scalegate.serving_check.server.text import StopStrings

from .server_fault import Deltas, M, Traffic
from .servers_in_use import FEW_TOKENS, before_answering, hidden

Events = AsyncIterator[bytes]


# What a request asks for, before the engine gets it.


@hidden("params", "no failed requests", "usage says")
def one_token_more_than_asked(asked: SamplingParams) -> SamplingParams:
    return replace(asked, max_tokens=asked.max_tokens + 1)


# Around a request.


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


# Around the events of a stream.


@hidden("events", "answers as asked", "tokens in all, with")
async def totals_without_the_prompt(events: Events) -> Events:
    async for some in events:
        yield re.sub(rb'("completion_tokens":(\d+),"total_tokens":)\d+', rb"\1\2", some)


@hidden("events", "answers as asked", "the answer says it is of")
async def another_model_in_the_answer(events: Events) -> Events:
    async for some in events:
        yield some.replace(b'"model":"', b'"model":"another/')
