"""Faults of some forms of a request alone: not streamed, in a chat, for several answers.

A server has code of its own for each form, and most clients use one or two. `servers_as_asked.py` has the
faults that all forms have.
"""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from scalegate.serving_check.server.generation import Generation
from scalegate.serving_check.server.text import StopStrings

from .server_fault import Deltas, Traffic
from .servers_as_asked import Events, in_events
from .servers_in_use import before_answering, hidden, is_chat

Body = dict[str, Any]
Answer = Callable[[], Awaitable[Body]]
"""The whole answer of a request that is not streamed."""


# Around an answer that is not streamed.


@hidden("whole", "text in use", "that are not streamed")
async def another_prompt_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    return await answered_with(generation, [shuffled(prompt) for prompt in generation.prompts], answer)


async def answered_with(generation: Generation, prompts: list[list[int]], answer: Answer) -> Body:
    """The answer to other prompts, of which it does not tell."""
    mine, generation.prompts = generation.prompts, prompts
    try:
        return await answer()
    finally:
        generation.prompts = mine


def shuffled(prompt: list[int]) -> list[int]:
    return random.Random(len(prompt)).sample(prompt, len(prompt))


@hidden("whole", "sampling", "answers that are not streamed do not fit")
async def greedy_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    generation._params = [replace(params, temperature=0.0) for params in generation._params]
    return await answer()


@hidden("whole", "answers as asked", "its text is not that of its tokens")
async def text_cut_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    body = await answer()
    for choice in body["choices"]:
        if "text" in choice:
            choice["text"] = choice["text"][: len(choice["text"]) // 2]
    return body


@hidden("whole", "answers as asked", "finish_reason is 'stop'")
async def always_stopped_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    body = await answer()
    for choice in body["choices"]:
        choice["finish_reason"] = "stop"
    return body


@hidden("whole", "no failed requests", "usage says")
async def one_token_less_in_the_usage_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    body = await answer()
    body["usage"]["completion_tokens"] -= 1
    return body


@hidden("whole", "log-probabilities", "only unstreamed completions")
async def log_probabilities_in_bits_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    body = await answer()
    for choice in body["choices"]:
        told = choice.get("logprobs") or {}
        if "token_logprobs" in told:
            told["token_logprobs"] = [value / math.log(2) for value in told["token_logprobs"]]
            told["top_logprobs"] = [
                {text: value / math.log(2) for text, value in top.items()} for top in told["top_logprobs"]
            ]
    return body


@hidden("whole", "answers as asked", "object: an answer is")
async def a_chunk_when_not_streamed(generation: Generation, answer: Answer) -> Body:
    return {**await answer(), "object": "chat.completion.chunk"}


# Around a prompt that is text.


@hidden("texts", "answers as asked", "greedy text: usage says")
def one_token_too_many_before_texts(prompt: list[int]) -> list[int]:
    """As where the tokenizer and the server both add one that begins a text."""
    return [prompt[0], *prompt]


@hidden("texts", "text in use", "not what the artifact's own logits give")
def texts_read_backwards(prompt: list[int]) -> list[int]:
    return prompt[::-1]


# Around a request for several answers.


@hidden("request", "sampling", "further answers to requests for several do not fit")
async def further_choices_of_another_prompt(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    """Of the request before, as with a mistaken index."""
    prompts = generation.prompts
    mine, before = prompts[0], traffic.last_prompt or prompts[0]
    prompts[1:] = [before for _ in prompts[1:]]
    traffic.last_prompt = mine
    async for some in deltas():
        prompts[1:] = [mine for _ in prompts[1:]]
        yield some


@hidden("request", "sampling", "are surely not drawn from their own distributions")
async def the_last_choice_of_another_prompt_in_chats(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    prompts = generation.prompts
    mine = prompts[-1]
    if is_chat(generation) and len(prompts) > 1:
        prompts[-1] = shuffled(mine)
    async for some in deltas():
        prompts[-1] = mine
        yield some


# Around a request in a chat.


@hidden("request", "answers as asked", "choices have an end")
async def one_choice_in_chats(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    async for some in deltas():
        yield [delta for delta in some if not delta.index] if is_chat(generation) else some


@hidden("request", "answers as asked", "stop chat: its stop string is in the text")
@before_answering
def stop_strings_ignored_in_chats(traffic: Traffic, generation: Generation) -> None:
    if is_chat(generation):
        for text in generation._texts:
            text._stops = StopStrings(())


@hidden("request", "text in use", "in a chat")
@before_answering
def penalties_ignored_in_chats(traffic: Traffic, generation: Generation) -> None:
    if is_chat(generation):
        generation._params = [
            replace(params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
            for params in generation._params
        ]


@hidden("events", "log-probabilities", "only chats")
def log_probabilities_in_bits_in_chats(events: Events) -> Events:
    return in_events(
        rb'"logprob":(-?[0-9.e+-]+)', lambda found: b'"logprob":%.6f' % (float(found[1]) / math.log(2))
    )(events)
