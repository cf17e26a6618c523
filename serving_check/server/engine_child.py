"""The engine's own process: builds the engine, steps it, and talks over one pipe, without HTTP or text.

The process is separate because tokenizing, detokenizing and writing to sockets would hold the interpreter
lock that the next step needs.
"""

import contextlib
import gc
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from ...base.errors import UserError
from ...base.gc_threshold import search_rarely
from ..engine.jit_monitor import JitError, JitMonitor, Mode
from ..engine.request import (
    EngineCapacity,
    EngineStats,
    FinishReason,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from .model_description import ModelDescription

STATS_INTERVAL = 0.05
"""Seconds between two snapshots sent while busy; the step that empties the engine always sends one."""


class SteppedEngine(Protocol):
    """The methods of an engine that this process uses."""

    max_model_len: int
    vocab_size: int
    capacity: EngineCapacity
    jit_monitor: JitMonitor

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def recover(self) -> list[str]: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def warm_up(self, progress: bool | None = None) -> None: ...


Describe = Callable[[], ModelDescription]
"""Describes the served model before it is loaded; picklable, and runs in the engine's process."""
EngineFactory = Callable[[ModelDescription], SteppedEngine]
"""Builds the engine in its process; picklable. A UserError from it, or from `Describe`, reaches the user."""


@dataclass(frozen=True)
class Add:
    request_id: str
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class EngineDescription:
    """The engine once it is loaded and warm."""

    max_model_len: int
    vocab_size: int
    capacity: EngineCapacity
    jit_monitor: Mode


@dataclass(frozen=True)
class EngineFailure:
    """The message that the engine has ended."""

    message: str
    user_error: bool
    """Whether the cause is something that the user can correct."""


@dataclass(frozen=True)
class Refusal:
    """The message that the engine did not accept this request; the user can put it right."""

    request_id: str
    message: str


@dataclass(frozen=True)
class StepFailure:
    """The message that a step failed because of the named requests; the engine continues without them."""

    request_ids: list[str]
    message: str


Output = tuple[
    str,
    tuple[int, ...],
    tuple[TokenLogprobs, ...],
    FinishReason | None,
    tuple[TokenLogprobs, ...] | None,
]
"""A StepOutput as a plain tuple, which pickles in a fraction of the time:
a busy server sends 20,000 a second."""


@dataclass(frozen=True)
class StepReport:
    """The results of one step, and sometimes the engine's counters."""

    outputs: list[Output]
    stats: EngineStats | None


def run_engine(connection: Connection, describe: Describe, factory: EngineFactory) -> None:
    """The process's main function. The loop ends when either process closes the other end of the pipe."""
    # The terminal's Ctrl-C and a container's SIGTERM reach the whole group; the parent drains, then closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    search_rarely()
    commands: queue.SimpleQueue[Add | Abort] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, commands), daemon=True).start()
    try:
        description = describe()
        connection.send(description)
        engine = factory(description)
        engine.warm_up()
        gc.collect()
        gc.freeze()
        ready = EngineDescription(
            engine.max_model_len, engine.vocab_size, engine.capacity, engine.jit_monitor.mode
        )
        connection.send(ready)
        _step_forever(engine, connection, commands)
    except UserError as error:
        _send_last(connection, EngineFailure(error.message, user_error=True))
    except BaseException as error:
        traceback.print_exc()
        _send_last(connection, EngineFailure(f"{type(error).__name__}: {error}", user_error=False))


def _send_last(connection: Connection, message: EngineFailure) -> None:
    """Tell the parent process, which may have ended too, why the engine has ended."""
    with contextlib.suppress(OSError):
        connection.send(message)


def _receive(connection: Connection, commands: "queue.SimpleQueue[Add | Abort]") -> None:
    """Read the pipe at all times, so that the parent never blocks on it; end if the parent closes it."""
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _step_forever(
    engine: SteppedEngine, connection: Connection, commands: "queue.SimpleQueue[Add | Abort]"
) -> None:
    stats_due = 0.0
    while True:
        while not engine.has_work:
            _obey(engine, connection, commands.get())
        while not commands.empty():
            _obey(engine, connection, commands.get())
        if not engine.has_work:
            connection.send(StepReport([], engine.stats()))
            continue
        try:
            outputs = [_plain(output) for output in engine.step()]
        except (UserError, JitError):
            raise
        except Exception as error:
            traceback.print_exc()
            connection.send(StepFailure(engine.recover(), f"{type(error).__name__}: {error}"))
            outputs = []
        now = time.monotonic()
        send_stats = now >= stats_due or not engine.has_work
        if send_stats:
            stats_due = now + STATS_INTERVAL
        if outputs or send_stats:
            connection.send(StepReport(outputs, engine.stats() if send_stats else None))


def _obey(engine: SteppedEngine, connection: Connection, command: Add | Abort) -> None:
    if isinstance(command, Abort):
        engine.abort(command.request_id)
        return
    try:
        engine.add_request(command.request_id, command.prompt, command.params)
    except UserError as error:
        connection.send(Refusal(command.request_id, error.message))
    except Exception as error:
        traceback.print_exc()
        engine.abort(command.request_id)
        connection.send(StepFailure([command.request_id], f"{type(error).__name__}: {error}"))


def _plain(output: StepOutput) -> Output:
    extra = output.logprobs, output.finish_reason, output.prompt_logprobs
    return output.request_id, output.token_ids, *extra
