"""Chat templates and the tokenizer in processes of their own, each job bounded in time and memory.

A template is a program that its maker wrote and clients feed: it may run forever or fill the memory, and
neither a thread nor an event loop can stop it. A process can be killed.
"""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from .errors import SERVER_ERROR, ApiError
from .fork_server import Process, start_process

T = TypeVar("T")
WORKERS = 2
START_SECONDS = 120.0
"""How many seconds a worker may take to load its libraries and the tokenizer."""
END_SECONDS = 2.0
MEMORY_FOR_A_JOB = 1 << 30
"""Bytes of address space beyond what the tokenizer takes."""


class TextWorkers:
    """Runs functions of the tokenizer; `run` is called on the event loop, `close` from anywhere."""

    def __init__(self, tokenizer: Any, seconds: float):
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._closing = False
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="text")
        for _ in range(WORKERS):
            self._workers.put(self._new())

    def start(self) -> None:
        """Start the processes before the first job comes, which would wait for them."""
        for worker in list(self._all):
            worker.start()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that have been started."""
        return [pid for worker in list(self._all) if (pid := worker.pid) is not None]

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(tokenizer, *arguments)`, both picklable. ApiError is raised if that takes too
        long.
        """
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._run, function, arguments)
        try:
            return await asyncio.wait_for(job, START_SECONDS)
        except TimeoutError:
            raise ApiError(
                "too many prompts wait for the chat template; try again later",
                status=429,
                code="too_many_prompts",
            ) from None

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Those that do nothing end by themselves, and leave nothing behind.
        with contextlib.suppress(queue.Empty):
            while True:
                self._workers.get_nowait().end()
        for worker in list(self._all):
            worker.kill()

    def _run(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        worker = self._workers.get()
        try:
            done, value = worker.ask((function, arguments), self._seconds)
        except (TimeoutError, EOFError, OSError) as error:
            worker.kill()
            self._all.discard(worker)
            if self._closing:
                raise ApiError("the server is stopping", status=503, type=SERVER_ERROR) from error
            worker = self._new()
            worker.start()
            raise ApiError(
                f"the chat template or the tokenizer took more than {self._seconds:g} s or "
                f"{MEMORY_FOR_A_JOB >> 30} GiB over this request",
                code="prompt_too_costly",
            ) from error
        finally:
            self._workers.put(worker)
        if not done:
            raise value
        return value

    def _new(self) -> "_Worker":
        worker = _Worker(self._tokenizer)
        self._all.add(worker)
        return worker


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._ready = self._killed = False
        self._started: tuple[Connection, Process] | None = None

    def start(self) -> None:
        """Start the process, once; it loads its libraries on its own time."""
        with self._lock:
            if self._started is None and not self._killed:
                self._started = start_process(work, self._tokenizer, name="scalegate-text")

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None before it is started."""
        return None if self._started is None else self._started[1].pid

    def ask(self, job: Any, seconds: float) -> tuple[bool, Any]:
        """Run a job. The result is whether the job succeeded, and its value or the error that it raised."""
        self.start()
        if self._started is None:
            raise EOFError
        connection, _ = self._started
        if not self._ready:
            _receive(connection, START_SECONDS)
            self._ready = True
        connection.send(job)
        return _receive(connection, seconds)

    def end(self) -> None:
        """Let the process end; it has no job."""
        if self._started is not None:
            connection, process = self._started
            connection.close()
            process.join(END_SECONDS)

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._started is not None:
                _, process = self._started
                process.kill()
                process.join()


def _receive(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()


def work(connection: Connection, tokenizer: Any) -> None:
    """The process's main function. The loop ends when the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _limit_memory()
    with contextlib.suppress(EOFError, OSError):
        connection.send(True)
        while True:
            function, arguments = connection.recv()
            try:
                answer = True, function(tokenizer, *arguments)
            except ApiError as error:
                answer = False, error
            except MemoryError:
                return
            except Exception as error:
                message = f"the prompt cannot be tokenized: {type(error).__name__}: {error}"
                answer = False, ApiError(message[:1000])
            connection.send(answer)


def _end_with_parent() -> None:
    """End this process when its parent ends, even in the middle of a job that does not end. The fork server
    does this for a forked process.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = psutil.Process().memory_info().vms + MEMORY_FOR_A_JOB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
