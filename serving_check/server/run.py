"""Starting and ending the server: first the port, then the engine's process, then HTTP until it is told to
stop.
"""

import functools
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from ...base.errors import UserError
from ..adapters.ready_line import ready_line
from .app import create_app
from .connection import Connection, allow_open_files
from .engine_child import Describe, EngineFactory
from .engine_client import EngineClient
from .limits import ServerLimits
from .metrics import Metrics
from .served_model import ServedModel
from .text_workers import TextWorkers

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in a shell. It is 0 after SIGTERM, which is the usual way to stop a
server."""


class EngineDied(RuntimeError):
    """The server has ended because its engine ended; a supervisor can start it again."""


@dataclass(frozen=True)
class ServerOptions:
    """How the server is reached and how it ends."""

    host: str = "127.0.0.1"
    """The address to listen at; loopback by default, since the API has no authentication without a key."""
    port: int = 8000
    """The port; 0 takes a free one, which the ready line names."""
    api_key: str | None = None
    drain_seconds: float = 30.0
    """How many seconds running requests may take to finish after SIGTERM."""
    limits: ServerLimits = field(default_factory=ServerLimits)


def run_server(
    options: ServerOptions,
    name: str,
    describe: Describe,
    factory: EngineFactory,
) -> None:
    """Serve until SIGTERM or SIGINT; returns when all is drained and the engine's process has ended.

    EngineDied is raised if the engine ended first: its requests were answered 503, and nothing is left to
    serve.
    """
    with bind(options.host, options.port) as listener, leave_on_signal():
        metrics = Metrics()
        metrics.model_name = name
        engine = EngineClient(describe, factory, metrics)
        workers = None
        try:
            description = engine.wait_until_described()  # the engine's process goes on to load the model
            if description.tokenizer is not None:
                workers = TextWorkers(description.tokenizer, options.limits.text_seconds)
                if getattr(description.tokenizer, "chat_template", None):
                    workers.start()
            ready = engine.wait_until_ready()
            metrics.capacity, metrics.jit_monitor = ready.capacity, ready.jit_monitor
            metrics.processes = functools.partial(_processes, engine, workers)
            model = ServedModel(
                name, description.tokenizer, ready.max_model_len, ready.vocab_size, description.defaults
            )
            app = create_app(engine, model, workers, metrics, options.limits, options.api_key)
            config = uvicorn.Config(
                app,
                http=functools.partial(Connection, options.limits),  # type: ignore[arg-type]
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
            )
            # A full collection would walk all of torch's and transformers' objects and stall every stream.
            gc.collect()
            gc.freeze()
            allow_open_files(options.limits.max_connections)
            sys.stdout.write(f"{ready_line(name, url_of(listener))}\n")
            sys.stdout.flush()
            server = uvicorn.Server(config)
            engine.on_death = functools.partial(setattr, server, "should_exit", True)
            server.run(sockets=[listener])
        finally:
            if workers is not None:
                workers.close()
            engine.close()
        if engine.dead is not None:
            raise EngineDied(f"the engine has died: {engine.dead}")


def _processes(engine: EngineClient, workers: TextWorkers | None) -> dict[str, list[int]]:
    """Return the ids of the server's processes, by their task."""
    return {
        "server": [os.getpid()],
        "engine": [] if engine.pid is None else [engine.pid],
        "text": [] if workers is None else workers.pids,
    }


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens there already, so that the port is ours before the model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Inherited by every connection. asyncio sets it only where the protocol was named, and without it
        # Nagle's algorithm holds each stream's first tokens back for the 40 ms of a delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except socket.gaierror as error:
        raise UserError(
            f"the host {host!r} is unknown ({error.strerror}); give an address of this machine"
        ) from error
    except OverflowError as error:
        raise UserError(f"there is no port {port}; give one from 0 to 65535") from error
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}. "
            "Give another --port, or --port 0 for any free port, or end the program that uses this one"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def leave_on_signal() -> Iterator[None]:
    """Let a signal to stop end the process cleanly inside the `with` block, before HTTP runs and after it has
    drained."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(INTERRUPTED if number == signal.SIGINT else 0)
