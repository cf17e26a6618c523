"""The API process's end of the pipe to the engine: it submits, aborts, receives, and knows when the engine is
dead.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UserError
from ..engine.request import FinishReason, SamplingParams, TokenLogprobs
from .engine_child import (
    Abort,
    Add,
    Describe,
    EngineDescription,
    EngineFactory,
    EngineFailure,
    Refusal,
    StepFailure,
    StepReport,
    run_engine,
)
from .errors import ApiError, engine_unavailable, step_failed
from .fork_server import start_process
from .metrics import Metrics
from .model_description import ModelDescription

JOIN_SECONDS = 10.0


@dataclass
class NewTokens:
    """One sequence's tokens since its reader last took them: from one step, or from several if the reader was
    slow.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Mailbox:
    """New tokens of all sequences of one HTTP request; its one reader takes all of them at once.

    A slow reader can thus catch up by writing fewer, longer chunks.
    """

    def __init__(self) -> None:
        self._unread: dict[int, NewTokens] = {}
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def put(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        new = self._unread.get(index)
        if new is None:
            new = self._unread[index] = NewTokens()
        new.token_ids.extend(token_ids)
        new.logprobs.extend(logprobs)
        new.finish_reason = finish_reason
        if prompt_logprobs is not None:
            new.prompt_logprobs = prompt_logprobs
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._changed.set()

    async def take(self) -> dict[int, NewTokens]:
        """Wait for new tokens and take them all, by sequence. ApiError is raised if the request failed."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return unread


@dataclass
class _Sequence:
    """A running sequence: the reader of its tokens, and the clock readings for its metrics."""

    mailbox: Mailbox
    index: int
    submitted: float
    last_token: float | None = None


class EngineClient:
    """One engine process. The engine is started by `start`, which blocks until it is ready; `listen` joins it
    to the running event loop.
    """

    def __init__(self, describe: Describe, factory: EngineFactory, metrics: Metrics):
        self._connection, self._process = start_process(
            run_engine, describe, factory, name="scalegate-engine"
        )
        self._metrics = metrics
        self._sequences: dict[str, _Sequence] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self.dead: str | None = None
        """Why the engine has ended; None while it runs."""
        self.on_death: Callable[[], None] = lambda: None
        """Called once if the engine ends while the event loop listens to it."""
        self.closing = False

    @property
    def pid(self) -> int | None:
        """Return the id of the engine's process."""
        return self._process.pid

    def wait_until_described(self) -> ModelDescription:
        """Block until the served model is known; the engine then loads it. Raise UserError if unreadable."""
        description: ModelDescription = self._next_message()
        return description

    def wait_until_ready(self) -> EngineDescription:
        """Block until the model is loaded and warm. UserError is raised if the model cannot be loaded."""
        engine: EngineDescription = self._next_message()
        return engine

    def _next_message(self) -> Any:
        """Wait for a message, before the event loop listens. UserError is raised if the engine has failed."""
        try:
            message = self._connection.recv()
        except EOFError:
            self._process.join(JOIN_SECONDS)
            raise UserError(
                f"the engine's process ended with status {self._process.exitcode} while loading the model; "
                "if the system killed it, memory probably ran out: lower --kv-cache-tokens"
            ) from None
        if isinstance(message, EngineFailure):
            self._process.join(JOIN_SECONDS)
            if message.user_error:
                raise UserError(message.message)
            raise UserError(f"the engine failed while loading: {message.message} (its traceback is above)")
        return message

    def listen(self) -> None:
        """Deliver the engine's messages in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._receive)
        # uvloop makes what it listens on non-blocking, where a full pipe and half a message are errors.
        os.set_blocking(self._connection.fileno(), True)

    def submit(
        self, request_id: str, index: int, prompt: list[int], params: SamplingParams, mailbox: Mailbox
    ) -> None:
        """Give the engine one sequence; its tokens arrive in `mailbox` under `index`."""
        if self.dead is not None:
            raise engine_unavailable(f"the engine has died: {self.dead}")
        self._sequences[request_id] = _Sequence(mailbox, index, time.perf_counter())
        self._send(Add(request_id, prompt, params))

    def abort(self, request_id: str) -> None:
        """Stop one sequence and free its pages; do nothing if the sequence has ended already."""
        if self._sequences.pop(request_id, None) is not None:
            self._metrics.finished("abort")
            self._send(Abort(request_id))

    def close(self) -> None:
        """End the engine's process; its running requests are lost."""
        self.closing = True
        if self._loop is not None and self.dead is None:
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self._process.join(JOIN_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, command: Add | Abort) -> None:
        try:
            self._connection.send(command)
        except OSError as error:
            self._died(str(error))

    def _receive(self) -> None:
        try:
            while self._connection.poll():
                self._dispatch(self._connection.recv())
        except (EOFError, OSError):
            self._died("its process ended")

    def _dispatch(self, message: object) -> None:
        if isinstance(message, StepReport):
            if message.stats is not None:
                self._metrics.observe_stats(message.stats)
            now = time.perf_counter()
            for request_id, token_ids, logprobs, finish_reason, prompt_logprobs in message.outputs:
                sequence = self._sequences.get(request_id)
                if sequence is None:
                    continue
                if token_ids:
                    self._metrics.observe_tokens(now, sequence.submitted, sequence.last_token)
                    sequence.last_token = now
                if finish_reason is not None:
                    del self._sequences[request_id]
                    self._metrics.finished(finish_reason, now - sequence.submitted)
                sequence.mailbox.put(sequence.index, token_ids, logprobs, finish_reason, prompt_logprobs)
        elif isinstance(message, Refusal):
            sequence = self._sequences.pop(message.request_id, None)
            if sequence is not None:
                sequence.mailbox.fail(ApiError(message.message, code="request_too_large"))
        elif isinstance(message, StepFailure):
            for request_id in message.request_ids:
                sequence = self._sequences.pop(request_id, None)
                if sequence is not None:
                    self._metrics.finished("abort")
                    sequence.mailbox.fail(step_failed(message.message))
        elif isinstance(message, EngineFailure):
            self._died(message.message)

    def _died(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        if self._loop is not None:
            self._loop.remove_reader(self._connection.fileno())
        sequences, self._sequences = self._sequences, {}
        for sequence in sequences.values():
            sequence.mailbox.fail(engine_unavailable(f"the engine has died: {reason}"))
        self.on_death()
