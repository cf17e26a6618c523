"""Faults of servers that a load of equal, greedy requests hides: a load as in use has to show them.

They hide in contexts, numbers of requests and settings that such a load never has, in requests that arrive
while others decode, and in what is left when it has ended. `servers.py` has the other faults.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import SamplingParams, StepOutput, TokenLogprobs
from scalegate.serving_check.server.generation import Generation
from scalegate.serving_check.server.text import StopStrings

from .server_fault import SLOWER, Deltas, Step, Traffic, fault, slowed
from .servers import attention

LONG_CONTEXT = 136
"""Tokens; the requests of the policy's load have 128."""
LONGER_CONTEXT = 1000
"""Tokens; nearly the longest that the zoo's servers take."""
WELL_UNDER_WAY = 4
"""Tokens of an answer after which a request that arrives is later than its companions of a closed loop."""
LONG_PROMPT = 256
"""Tokens: nearly a quarter of what the zoo's servers take, and four times a prompt of the policy's load."""
PAUSE_S = 0.3
TOKEN_S = 0.06
LEAKED = 1 << 16
"""Bytes a request."""
CLIFF = 3000
SHARED = 16
"""Tokens that two prompts have in common from which on a cache holds them for one."""
LONGEST_ANSWER = 128
FEW_TOKENS = 5
WRONG = "not what the artifact's own logits give"


def hidden(where: str, check: str, words: str) -> Callable[[Any], Any]:
    return fault(where, check, words, in_use=True)


def before_answering(change: Callable[[Traffic, Generation], None]) -> Callable[..., Deltas]:
    """A fault in what is kept of a request or made of it: it is answered as usual afterwards."""

    @functools.wraps(change)
    async def answer(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
        change(traffic, generation)
        async for some in deltas():
            yield some

    return answer


def under_way(engine: Engine) -> int:
    """Requests that have decoded for a while."""
    return sum(
        not sequence.is_prefilling and sequence.num_output >= WELL_UNDER_WAY
        for sequence in engine.scheduler.running
    )


def has_arrival(engine: Engine) -> bool:
    """Whether a request has come while others decode."""
    return bool(engine.scheduler.waiting) and under_way(engine) > 0


def shuffled(output: torch.Tensor) -> torch.Tensor:
    """Attention's result [T, H, D] with each head's numbers in the wrong places: garbage of a sound size."""
    return output.roll(1, -1)


# Around the engine's step.


@hidden("engine", "throughput", "(drawn)")
def slow_between_powers_of_two(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    def step_between(step: Step) -> list[StepOutput]:
        running = len(engine.scheduler.running)
        return slowed(step, SLOWER if running & (running - 1) else 1)

    return step_between


@hidden("engine", "speed in use", "while prompts are read")
def slow_reading_beside_decoding(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    def reads(step: Step) -> list[StepOutput]:
        scheduler = engine.scheduler
        mixed = has_arrival(engine) or (
            under_way(engine) > 0 and any(sequence.is_prefilling for sequence in scheduler.running)
        )
        return slowed(step, SLOWER if mixed else 1)

    return reads


@hidden("engine", "speed in use", "streams wait")
def pause_when_a_request_arrives(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    def paused(step: Step) -> list[StepOutput]:
        if has_arrival(engine):
            time.sleep(PAUSE_S)
        return step()

    return paused


@fault("engine", "profile of loads", "prompts are read at", profile="rag")
def slow_reading_of_long_prompts(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """Those that no other load has many of."""

    def reads(step: Step) -> list[StepOutput]:
        scheduler = engine.scheduler
        reading = [
            *scheduler.waiting,
            *(sequence for sequence in scheduler.running if sequence.is_prefilling),
        ]
        long = any(sequence.num_prompt > LONG_PROMPT for sequence in reading)
        return slowed(step, SLOWER if long else 1)

    return reads


@hidden("engine", "text in use", "beside which a prompt was read")
def garbage_when_a_request_arrives(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """For those that decode; the prompt that came is read rightly."""

    def arrival(step: Step) -> list[StepOutput]:
        if not has_arrival(engine):
            return step()
        with attention(engine, lambda output, of: output if of.host.num_prefills else shuffled(output)):
            return step()

    return arrival


@hidden("engine", "text in use", "tokens of context")
def garbage_in_long_contexts(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return garbage_beyond(engine, LONG_CONTEXT)


@hidden("engine", "text in use", "tokens of context")
def garbage_in_the_longest_contexts(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return garbage_beyond(engine, LONGER_CONTEXT)


def garbage_beyond(engine: Engine, context: int) -> Callable[[Step], list[StepOutput]]:
    def beyond(output: torch.Tensor, metadata: Any) -> torch.Tensor:
        long = metadata.positions[: len(output), None, None] >= context
        return torch.where(long, shuffled(output), output)

    return always(engine, beyond)


@hidden("engine", "text in use", WRONG)
def garbage_with_mixed_prompt_lengths(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    def mixed(output: torch.Tensor, metadata: Any) -> torch.Tensor:
        lengths = {chunk.count for chunk in metadata.host.requests(metadata.host.num_decodes)}
        return shuffled(output) if len(lengths) > 1 else output

    return always(engine, mixed)


def always(
    engine: Engine, change: Callable[[torch.Tensor, Any], torch.Tensor]
) -> Callable[[Step], list[StepOutput]]:
    def changed(step: Step) -> list[StepOutput]:
        with attention(engine, change):
            return step()

    return changed


@hidden("engine", "drift", "× as long")
def cliff_after_thousands_of_requests(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    ended = 0

    def cliff(step: Step) -> list[StepOutput]:
        nonlocal ended
        outputs = slowed(step, SLOWER if ended > CLIFF else 1)
        ended += sum(output.finish_reason is not None for output in outputs)
        return outputs

    return cliff


# Around the abort of a request.


def pages_of(engine: Engine, request_id: str) -> Sequence[int]:
    sequence = engine._sequences.get(request_id)
    return () if sequence is None else tuple(sequence.pages)


@hidden("abort", "at rest", "were never freed")
def pages_never_freed_after_an_abort(engine: Engine, request_id: str, abort: Callable[[str], None]) -> None:
    pages = pages_of(engine, request_id)
    abort(request_id)
    for page in pages:
        engine.pool._free_pages.remove(page)


@hidden("abort", "text in use", WRONG)
def pages_freed_twice_after_an_abort(engine: Engine, request_id: str, abort: Callable[[str], None]) -> None:
    """Two later requests then write to the same pages."""
    pages = pages_of(engine, request_id)
    abort(request_id)
    engine.pool._free_pages.extend(pages)


@hidden("abort", "at rest", "go on without their client")
def aborted_requests_run_on(engine: Engine, request_id: str, abort: Callable[[str], None]) -> None:
    """To the last token that they asked for."""
    if request_id not in engine._sequences:
        abort(request_id)


# What a request asks for, before the engine gets it.


@hidden("params", "sampling", "drawn from other logits")
def garbage_when_sampled(asked: SamplingParams) -> SamplingParams:
    return replace(asked, temperature=100.0) if asked.temperature else asked


@hidden("params", "sampling", "as if the temperature were")
def temperature_ten_percent_higher(asked: SamplingParams) -> SamplingParams:
    return replace(asked, temperature=1.1 * asked.temperature)


@hidden("params", "sampling", "as if the temperature were")
def temperature_ten_percent_lower(asked: SamplingParams) -> SamplingParams:
    return replace(asked, temperature=0.9 * asked.temperature)


@hidden("params", "sampling", "drawn")
def drawn_from_the_most_likely(asked: SamplingParams) -> SamplingParams:
    """As with settings of the model's maker that the request has turned off. Few tokens and a low temperature
    look alike.
    """
    return replace(asked, top_k=FEW_TOKENS) if asked.temperature else asked


@hidden("params", "sampling", "seeds have no effect")
def one_seed_for_all(asked: SamplingParams) -> SamplingParams:
    return replace(asked, seed=1)


@hidden("params", "answers as asked", "seed")
def seeds_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, seed=None)


@hidden("params", "answers as asked", "end")
def end_token_ignored(asked: SamplingParams) -> SamplingParams:
    return replace(asked, ignore_eos=True, stop_token_ids=())


@hidden("params", "no failed requests", "tokens, usage says 128")
def long_answers_cut_short(asked: SamplingParams) -> SamplingParams:
    most, least = (min(tokens, LONGEST_ANSWER) for tokens in (asked.max_tokens, asked.min_tokens))
    return replace(asked, max_tokens=most, min_tokens=least)


# Around a request.


@hidden("request", "answers as asked", "stop")
@before_answering
def stop_strings_ignored(traffic: Traffic, generation: Generation) -> None:
    for text in generation._texts:
        text._stops = StopStrings(())


@hidden("request", "answers as asked", "tokens")
@before_answering
def another_chat_template(traffic: Traffic, generation: Generation) -> None:
    """Without the tokens that begin an answer."""
    if is_chat(generation):
        del generation.prompts[0][-2:]
        generation.prompt_tokens -= 2


@hidden("request", "text in use", "only answers in a chat are wrong")
@before_answering
def another_chat_template_of_the_same_length(traffic: Traffic, generation: Generation) -> None:
    if is_chat(generation):
        generation.prompts[0].reverse()


def is_chat(generation: Generation) -> bool:
    return generation._ids[0].startswith("chatcmpl-")


@hidden("request", "text in use", WRONG)
@before_answering
def shared_prefixes_mixed_up(traffic: Traffic, generation: Generation) -> None:
    """Of two prompts that begin alike, the later one reads a page of the earlier one's too much."""
    prompt = generation.prompts[0]
    first = traffic.prefixes.setdefault(tuple(prompt[:SHARED]), list(prompt))
    pairs = zip(first, prompt, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if alike >= SHARED:
        page = first[alike : alike + SHARED][: len(prompt) - alike]
        prompt[alike : alike + len(page)] = page


@hidden("request", "at rest", "memory grows by")
@before_answering
def memory_kept_of_every_request(traffic: Traffic, generation: Generation) -> None:
    traffic.kept.append(b"x" * LEAKED)


@hidden("request", "at rest", "memory grows by")
@before_answering
def memory_kept_of_every_stream_that_is_sampled(traffic: Traffic, generation: Generation) -> None:
    if any(params.temperature for params in generation._params):
        traffic.kept.append(b"x" * LEAKED)


@hidden("request", "at rest", "memory grows by")
@before_answering
def memory_kept_of_every_chat(traffic: Traffic, generation: Generation) -> None:
    if is_chat(generation):
        traffic.kept.append(b"x" * LEAKED)


@hidden("request", "sampling", "the temperature is ignored")
@before_answering
def greedy_chats(traffic: Traffic, generation: Generation) -> None:
    """A route that knows fewer fields than the other one."""
    if is_chat(generation):
        generation._params = [replace(params, temperature=0.0) for params in generation._params]


@hidden("request", "speed in use", "the first token of chats takes")
async def late_first_tokens_of_chats(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    async for some in late(deltas, is_chat(generation)):
        yield some


@hidden("request", "speed in use", "the first token of requests with prompts of more than")
async def late_first_tokens_after_long_prompts(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    async for some in late(deltas, generation.prompt_tokens > LONG_CONTEXT):
        yield some


async def late(deltas: Callable[[], Deltas], is_late: bool) -> Deltas:
    """The first token takes several times as long, if it is late."""
    began = time.perf_counter()
    async for some in deltas():
        if is_late:
            await asyncio.sleep(PAUSE_S + (SLOWER - 1) * (time.perf_counter() - began))
            is_late = False
        yield some


@hidden("request", "speed in use", "the TPOT of sampled requests")
async def slow_streams_when_sampled(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    """Something is done for each sampled token, in the server and not in the engine's step, which goes on
    meanwhile: it shows only where the engine takes less than that for a token."""
    async for some in deltas():
        yield some
        if any(params.temperature for params in generation._params):
            await asyncio.sleep(TOKEN_S * sum(len(delta.token_ids) for delta in some))


# Around a stream, on its way to the client.


@hidden("stream", "log-probabilities", "look at the temperature, the base")
async def log_probabilities_in_bits(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield [replace(delta, logprobs=[in_bits(logprob) for logprob in delta.logprobs]) for delta in some]


def in_bits(logprobs: TokenLogprobs) -> TokenLogprobs:
    return replace(logprobs, logprob=logprobs.logprob / math.log(2))
