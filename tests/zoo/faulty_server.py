"""`pipeline serve` with one fault at a time, named in a file that it looks at again and again.

    python -P faulty_server.py FAULT_FILE CHECKPOINT [options of `pipeline serve`...]

Faults of the engine are injected around its step, faults of the server around its streams; what they are is
`servers.py`. One server serves for all of them, since starting it takes longer than judging it.
"""

import functools
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands import serve as serving
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import StepOutput
from scalegate.serving_check.server import app
from scalegate.serving_check.server.generation import Delta, Generation
from scalegate.tests.zoo.servers import Traffic, of


class Switch:
    """The fault that is on, as the file says it."""

    def __init__(self, path: Path):
        self._path = path
        self._stamp = -1
        self._name = ""

    @property
    def name(self) -> str:
        stamp = self._path.stat().st_mtime_ns
        if stamp != self._stamp:
            self._stamp, self._name = stamp, self._path.read_text()
        return self._name


def build_faulty_engine(path: Path, folder: Path, options: EngineOptions, tokenizer: Any) -> Engine:
    engine = serving.build_engine(folder, options, tokenizer)
    switch = Switch(path)
    made = {name: fault(engine) for name, fault in of("engine").items()}
    step = engine.step

    def faulty_step() -> list[StepOutput]:
        fault = made.get(switch.name)
        return step() if fault is None else fault(step)

    engine.step = faulty_step  # type: ignore[method-assign]
    return engine


def make_streams_faulty(path: Path) -> None:
    """Every request, and every stream, goes through the fault that is on."""
    switch, traffic = Switch(path), Traffic()
    requests, streams = of("request"), of("stream")
    deltas, stream = Generation.deltas, app.stream

    async def faulty_deltas(self: Generation) -> AsyncIterator[list[Delta]]:
        fault = requests.get(switch.name)
        traffic.open += 1
        try:
            source = deltas(self) if fault is None else fault(traffic, self, lambda: deltas(self))
            async for some in source:
                yield some
        finally:
            traffic.open -= 1

    def faulty_stream(first: list[Delta], rest: Any, *others: Any) -> AsyncIterator[bytes]:
        fault = streams.get(switch.name)
        if fault is None:
            return stream(first, rest, *others)
        return stream([], fault(traffic, chained(first, rest)), *others)

    Generation.deltas = faulty_deltas  # type: ignore[method-assign]
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
