"""`pipeline serve` with the faults that are named in a file, which it looks at again and again.

    python -P faulty_server.py FAULT_FILE CHECKPOINT [options of `pipeline serve`...]

Faults of the engine are injected around its step and its aborts, faults of the server around requests, around
streams and their events, and around answers that are not streamed; what they are is in `servers*.py`. One
server serves for all of them, since starting it takes longer than judging it. Several at once are separated
by `+`.
"""

import contextlib
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands import serve as serving
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import StepOutput
from scalegate.serving_check.server import app
from scalegate.serving_check.server.generation import Delta, Generation
from scalegate.serving_check.server.schema import CompletionRequest
from scalegate.serving_check.server.served_model import ServedModel
from scalegate.tests.zoo.all_server_faults import of
from scalegate.tests.zoo.server_fault import TOGETHER, Step, Traffic


class Switch:
    """The faults that are on, as the file says it."""

    def __init__(self, path: Path):
        self._path = path
        self._stamp = -1
        self._names: tuple[str, ...] = ()

    def has_changed(self) -> bool:
        """Whether the file was written since this was asked last."""
        stamp = self._path.stat().st_mtime_ns
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self._names = tuple(filter(None, self._path.read_text().split(TOGETHER)))
        return True

    def on(self, faults: dict[str, Any]) -> list[Any]:
        return [faults[name] for name in self._names if name in faults]


def build_faulty_engine(path: Path, folder: Path, options: EngineOptions, tokenizer: Any) -> Engine:
    engine = serving.build_engine(folder, options, tokenizer)
    switch, around_steps, around_aborts = Switch(path), of("engine"), of("abort")
    step, abort = engine.step, engine.abort
    made: list[Callable[[Step], list[StepOutput]]] = []

    def faulty_step() -> list[StepOutput]:
        if switch.has_changed():
            made[:] = [fault(engine) for fault in switch.on(around_steps)]
            forget_pages(engine)
        return functools.reduce(lambda inner, fault: lambda: fault(inner), made, step)()

    def faulty_abort(request_id: str) -> None:
        around = functools.reduce(
            lambda inner, fault: lambda request_id: fault(engine, request_id, inner),
            switch.on(around_aborts),
            abort,
        )
        around(request_id)

    engine.step = faulty_step  # type: ignore[method-assign]
    engine.abort = faulty_abort  # type: ignore[method-assign]
    return engine


def forget_pages(engine: Engine) -> None:
    """Give the pool all of its pages back, whatever the last faults did to them, while nothing runs."""
    if not engine.scheduler.running:
        engine.pool._free_pages = list(range(engine.pool.num_pages, 0, -1))


def make_streams_faulty(path: Path) -> None:
    """Every request, and every stream, goes through the faults that are on."""
    switch, traffic = Switch(path), Traffic()
    asked, requests, streams, events, whole, texts = map(
        of, ("params", "request", "stream", "events", "whole", "texts")
    )
    deltas, stream, collect = Generation.deltas, app.stream, app.collect
    prompts_of = ServedModel.prompts_of

    async def faulty_deltas(self: Generation) -> AsyncIterator[list[Delta]]:
        nonlocal traffic
        if switch.has_changed():
            traffic = Traffic()
        for change in switch.on(asked):
            self._params = [change(params) for params in self._params]
        known = traffic
        known.open += 1
        source = functools.reduce(
            lambda inner, fault: lambda: fault(known, self, inner), switch.on(requests), lambda: deltas(self)
        )
        try:
            # What is left early ends its request in the engine at once.
            async with contextlib.aclosing(source()) as all_deltas:
                async for some in all_deltas:
                    yield some
        finally:
            known.open -= 1

    def faulty_prompts(self: ServedModel, body: CompletionRequest) -> list[list[int]]:
        prompts = prompts_of(self, body)
        is_text = any(isinstance(prompt, str) for prompt in body.prompts)
        for change in switch.on(texts) if is_text else ():
            prompts = [change(prompt) for prompt in prompts]
        return prompts

    def faulty_stream(first: list[Delta], rest: Any, *others: Any) -> AsyncIterator[bytes]:
        if faults := switch.on(streams):
            changed = functools.reduce(
                lambda inner, fault: fault(traffic, inner), faults, chained(first, rest)
            )
            first, rest = [], changed
        sent = stream(first, rest, *others)
        return functools.reduce(lambda inner, fault: fault(inner), switch.on(events), sent)

    async def faulty_collect(generation: Generation, api: Any) -> Any:
        async def answer() -> Any:
            return json.loads((await collect(generation, api)).body)

        if not (faults := switch.on(whole)):
            return await collect(generation, api)
        changed = functools.reduce(lambda inner, fault: lambda: fault(generation, inner), faults, answer)
        return JSONResponse(await changed())

    ServedModel.prompts_of = faulty_prompts  # type: ignore[method-assign]
    Generation.deltas = faulty_deltas  # type: ignore[method-assign]
    app.collect = faulty_collect
    app.stream = faulty_stream  # type: ignore[assignment]


async def chained(first: list[Delta], rest: AsyncIterator[list[Delta]]) -> AsyncIterator[list[Delta]]:
    yield first
    async for some in rest:
        yield some


if __name__ == "__main__":
    # Processes are forked where what is pickled is named by its module, which runs here under another name.
    from scalegate.tests.zoo.faulty_server import build_faulty_engine as build

    fault_file = Path(sys.argv[1])
    serving.build_engine = functools.partial(build, fault_file)  # type: ignore[assignment]
    make_streams_faulty(fault_file)
    main(["serve", *sys.argv[2:]], prog_name="faulty_server.py")
