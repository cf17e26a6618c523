"""Ways in which a server has been made faulty, each with the check that must catch it and its words.

The faults are a few lines each: around the engine's step, around a request before the engine gets it, or
around a stream on its way out. `faulty_server.py` puts them in; `test_servers.py` runs the gate on them.
Those that only a load as in use shows are in `servers_in_use.py` and `servers_as_asked.py`.
"""

import asyncio
import gc
import io
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import StepOutput
from scalegate.serving_check.server.errors import ApiError
from scalegate.serving_check.server.generation import Delta, Generation

from .server_fault import SLOWER, Deltas, M, Step, Traffic, fault, slowed

CAP = 2
SLOW = 10


# Around the engine's step.


@fault("engine", "throughput", "at M=", quick=True)
def ten_times_slower(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return lambda step: slowed(step, SLOW)


# Not so slow that measuring ends at the first M: what M=1 takes says that the batch is not the cause. Alone,
# a request of the sound artifact takes .6 of what the baseline's takes.
@fault("engine", "latency", "every decode step takes longer, from M=1 on")
def slow_at_every_batch_size(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return lambda step: slowed(step, 3.2 if len(engine.scheduler.running) == 1 else 2.2)


@fault("engine", "latency", "decode steps take longer as the batch grows")
def slow_as_the_batch_grows(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return lambda step: slowed(step, 5 if len(engine.scheduler.running) > M // 2 else 1)


def reads_prompts(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return bool(scheduler.waiting) or any(sequence.is_prefilling for sequence in scheduler.running)


# Measuring ends when either throughput is decided, of whole requests or of decoding: latency says why.
@fault("engine", "latency", "every decode step takes longer", long_prompts=True)
def slow_decode_at_length(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return lambda step: slowed(step, 1 if reads_prompts(engine) else SLOWER)


@fault("engine", "throughput", "at M=", long_prompts=True)
def slow_reading_of_prompts(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return lambda step: slowed(step, SLOWER if reads_prompts(engine) else 1)


@fault("engine", "throughput", "at M=")
def throttled_device(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """At full speed until it is warm."""
    began: list[float] = []

    def step_hot(step: Step) -> list[StepOutput]:
        began.append(began[0] if began else time.monotonic())
        del began[1:]
        return slowed(step, SLOWER if time.monotonic() - began[0] > 0.5 else 1)

    return step_hot


@fault("engine", "throughput", "at M=")
def item_in_a_step(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """As a sampler does that looks at every logit from Python."""
    row = torch.zeros(engine.vocab_size)

    def step_with_items(step: Step) -> list[StepOutput]:
        outputs = step()
        for _ in outputs:
            max(value.item() for value in row)
        return outputs

    return step_with_items


@fault("engine", "throughput", "at M=")
def python_flush_in_a_step(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """Collects garbage, and writes a log of everything, in every step."""

    def step_with_flush(step: Step) -> list[StepOutput]:
        gc.unfreeze()
        gc.collect()
        print(*engine.pool.block_table.tolist(), file=io.StringIO(), flush=True)
        return step()

    return step_with_flush


@fault("engine", "compilations in traffic", "dynamo compilation of", quick=True)
def kernel_compiled_every_step(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    def specialized(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    def compiling_step(step: Step) -> list[StepOutput]:
        outputs = step()
        # New code each time: Dynamo stops compiling what it has compiled too often.
        fresh = types.FunctionType(specialized.__code__.replace(), specialized.__globals__)
        torch.compile(fresh, backend="eager")(torch.ones(1 + len(outputs)))
        return outputs

    return compiling_step


@fault("engine", "M reached", f"M={M}: ", quick=True)
def capped_with_waiting_requests(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    scheduler = engine.scheduler
    can_admit = scheduler._can_admit

    def capped_step(step: Step) -> list[StepOutput]:
        scheduler._can_admit = lambda sequence: len(scheduler.running) < CAP and can_admit(sequence)  # type: ignore
        try:
            return step()
        finally:
            scheduler._can_admit = can_admit  # type: ignore[method-assign]

    return capped_step


@contextmanager
def attention(engine: Engine, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Iterator[None]:
    """Inside, every layer's attention gives what `change` makes of [T, H, D]."""
    # A model with a hook is computed by its modules, which call the layers.
    hook = engine.runner.model.register_forward_hook(lambda *_: None)
    layers = list(engine.pool.layers.values())
    forwards = [layer.forward for layer in layers]

    def changed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda q, k, v, metadata, *rest: change(forward(q, k, v, metadata, *rest), metadata)

    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = changed(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward  # type: ignore[method-assign]
        hook.remove()


def step_with_attention(
    change: Callable[[torch.Tensor, Any], torch.Tensor],
) -> Callable[[Engine], Callable[[Step], list[StepOutput]]]:
    def inject(engine: Engine) -> Callable[[Step], list[StepOutput]]:
        def changed_step(step: Step) -> list[StepOutput]:
            with attention(engine, change):
                return step()

        return changed_step

    return inject


@fault("engine", "served text", "not what the artifact's own logits give")
def drifting_split_kv(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """Partial sums over a long context are weighted wrongly: the longer, the further off."""

    def drift(output: torch.Tensor, metadata: Any) -> torch.Tensor:
        positions = metadata.positions[: len(output)].to(output.dtype)
        return output * (1 + positions[:, None, None] / 32)

    return step_with_attention(drift)(engine)


@fault("engine", "served text", "only that load is wrong")
def wrong_kernel_for_one_batch_size(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return step_with_attention(lambda output, _: output.roll(1, 0) if len(output) == M else output)(engine)


@fault("engine", "stalls", "stalled", quick=True)
def pauses(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    """Everything stops for 0.4 s every 2 s."""
    return paused(every=2.0, seconds=0.4)


@fault("engine", "stalls", "stalled", rare=True)
def rare_pauses(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return paused(every=5.0, seconds=0.4)


@fault("engine", "stalls", "stalled", rare=True)
def long_pauses(engine: Engine) -> Callable[[Step], list[StepOutput]]:
    return paused(every=4.0, seconds=1.5)


def paused(every: float, seconds: float) -> Callable[[Step], list[StepOutput]]:
    def paused_step(step: Step) -> list[StepOutput]:
        if time.monotonic() % every < seconds:
            time.sleep(seconds - time.monotonic() % every % seconds)
        return step()

    return paused_step


# Around a request, before the engine gets it.


@fault("request", "M reached", f"M={M}: 1 running")
async def serial_lock(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
    async with traffic.lock:
        async for some in deltas():
            yield some


@fault("request", "served text", "not what the artifact's own logits give", quick=True)
async def crossed_answers(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
    """Each request gets the answer to the one before it."""
    mine = generation.prompts[0]
    generation.prompts[0] = traffic.last_prompt or mine
    traffic.last_prompt = mine
    async for some in deltas():
        yield some


@fault("request", "canary text", "its text is not what the baseline would write", quick=True)
async def answers_to_a_list_mixed_up(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    """Each prompt of a request's list gets the answer to another one."""
    generation.prompts.reverse()
    async for some in deltas():
        yield some


@fault("request", "served text", "repeat another answer")
async def one_answer_for_all(
    traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]
) -> Deltas:
    traffic.last_prompt = traffic.last_prompt or generation.prompts[0]
    generation.prompts[0] = traffic.last_prompt
    async for some in deltas():
        yield some


@fault("request", "plausible speed", "answered from a cache", quick=True)
async def response_cache(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
    key = (*generation.prompts[0], generation._params[0].max_tokens)
    if key in traffic.cache:
        for some in traffic.cache[key]:
            generation._texts[0].tokens += sum(len(delta.token_ids) for delta in some)
            yield some
        return
    kept = []
    async for some in deltas():
        kept.append(some)
        yield some
    traffic.cache[key] = kept


@fault("request", "tokens received", "the server's own counter rose by")
async def made_up_tokens(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
    """The engine makes half of the tokens, and the server the others."""
    wanted = generation._params[0].max_tokens
    generation._params[0] = replace(generation._params[0], max_tokens=wanted // 2)
    async for some in deltas():
        last = some[-1]
        if last.finish_reason is None:
            yield some
            continue
        rest = replace(last, finish_reason=None)
        for count in range(wanted - wanted // 2):
            generation._texts[0].tokens += 1
            ends = "length" if count + 1 == wanted - wanted // 2 else None
            yield [replace(rest, finish_reason=ends)] if count else [rest, replace(rest, finish_reason=ends)]


@fault("request", "no failed requests", "out of luck")
async def failing_requests(traffic: Traffic, generation: Generation, deltas: Callable[[], Deltas]) -> Deltas:
    traffic.seen += 1
    if traffic.seen % 20 == 0:
        raise ApiError("out of luck", status=500)
    async for some in deltas():
        yield some


# Around a stream, on its way to the client.


def garbled(some: list[Delta]) -> list[Delta]:
    return [replace(delta, text=delta.text.swapcase()[::-1]) for delta in some]


@fault("stream", "tokens received", "end early", quick=True)
async def half_the_answer(traffic: Traffic, deltas: Deltas) -> Deltas:
    """Every other chunk is lost, and `usage` claims them all."""
    index = 0
    async for some in deltas:
        index += 1
        if index % 2 == 0:
            some = [replace(delta, text="", token_ids=[]) for delta in some]
        yield some


@fault("stream", "served text", "does not match their token ids")
async def garbled_in_streams(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield garbled(some)


@fault("stream", "served text", "does not match their token ids")
async def garbled_when_together(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield garbled(some) if traffic.open >= M else some


@fault("stream", "served text", "one token repeated")
async def one_token_answers(traffic: Traffic, deltas: Deltas) -> Deltas:
    async for some in deltas:
        yield [replace(delta, text=" a" * len(delta.token_ids), token_ids=[64] * len(delta.token_ids))
               for delta in some]  # fmt: skip


@fault("stream", "streamed", "everything comes in one burst at the end", quick=True)
async def not_streamed(traffic: Traffic, deltas: Deltas) -> Deltas:
    for some in [some async for some in deltas]:
        yield some


@fault("stream", "latency", "so a few are slow")
async def slow_tail(traffic: Traffic, deltas: Deltas) -> Deltas:
    traffic.seen += 1
    slow = traffic.seen % 4 == 0
    async for some in deltas:
        if slow:
            await asyncio.sleep(0.04 * sum(len(delta.token_ids) for delta in some))
        yield some


@fault("stream", "no failed requests", "no end within")
async def hanging_requests(traffic: Traffic, deltas: Deltas) -> Deltas:
    traffic.seen += 1
    hangs = traffic.seen % 20 == 0
    async for some in deltas:
        yield some
        if hangs:
            await asyncio.sleep(3600)


@fault("stream", "no failed requests", "Error")
async def cut_streams(traffic: Traffic, deltas: Deltas) -> Deltas:
    traffic.seen += 1
    cut = traffic.seen % 20 == 0
    async for some in deltas:
        yield some
        if cut:
            raise ConnectionResetError("cut")
