"""A server's engine and tokenizer in processes of their own, forked from a process that has imported torch
already.

Importing torch and the models' library takes over three CPU seconds in each process of a server, and a
verdict starts two servers. While `fork_server` is open, servers started below this process have it fork their
processes; without it, and if their environment differs, the processes are spawned. GPUs are excluded, since a
GPU's driver does not survive a fork.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

ADDRESS = "SCALEGATE_FORK_SERVER"
"""The environment variable with the address at which a fork server listens."""
READ_WHILE_IMPORTED = (
    *("ATEN", "CPU", "CUDA", "DNNL", "GOMP", "HF_", "KMP", "LD_", "MALLOC", "MKL", "OMP", "ONEDNN"),
    *("OPENBLAS", "PYTHON", "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON"),
)
"""Prefixes of variables that libraries read once."""
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_DEFAULT_FP_FUSION")
"""Variables that torch's compiler and `kernels/triton_versions.py` set when a command imports them, after its
fork server was started. No import reads them."""
PR_SET_PDEATHSIG = 1
"""The option of `prctl` that sends this process a signal when its parent ends."""
SIZE, NUMBER = struct.Struct("!Q"), struct.Struct("!i")
REFUSED = 0
REQUEST_SECONDS = 20.0
IMPORTING_SECONDS = 120.0


class Process(Protocol):
    """A started process: the part of `multiprocessing.Process` that its owner uses."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


Main = Callable[..., None]
"""A process's main function. It takes the other end of our connection, then the arguments; all are
picklable."""


def start_process(main: Main, *arguments: Any, name: str) -> tuple[Connection, Process]:
    """Start a process that runs `main(connection, *arguments)`; it ends with this process at the latest."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        address = os.environ.get(ADDRESS)
        forked = None if address is None else _fork(address, theirs, main, arguments)
        if forked is not None:
            return ours, forked
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=main, args=(theirs, *arguments), name=name, daemon=True)
        process.start()
        return ours, process


@contextlib.contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[None]:
    """Import `modules` in a process from which servers started meanwhile fork their processes."""
    with (
        tempfile.TemporaryDirectory(prefix="scalegate-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder) / "fork")
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,
            # Of the imports: nothing that a user can act on. The processes have their clients' output.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        # Whoever connects from now on is heard, and who waits when the process ends is told so.
        listener.close()
        outer = os.environ.get(ADDRESS)
        with process:
            os.environ[ADDRESS] = address
            try:
                yield
            finally:
                os.environ.pop(ADDRESS)
                if outer is not None:
                    os.environ[ADDRESS] = outer
                process.kill()


class ForkedProcess:
    """A forked process as the client sees it: the channel delivers the exit status, and closing the channel
    ends the process.
    """

    def __init__(self, channel: socket.socket, pid: int):
        self._channel = channel
        self.pid = pid
        self._lock = threading.Lock()
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        with self._lock:
            if self.exitcode is None and wait([self._channel], timeout):
                status = self._channel.recv(NUMBER.size)
                # A fork server that is gone has taken its children with it.
                self.exitcode = NUMBER.unpack(status)[0] if len(status) == NUMBER.size else -signal.SIGKILL
                self._channel.close()

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Request:
    """The purpose of a forked process, and the surroundings that a spawned process would have."""

    environment: dict[str, str]
    cores: set[int]
    folder: str
    path: list[str]
    job: bytes
    """The pickled main function and its arguments."""

    @classmethod
    def of(cls, job: bytes) -> "Request":
        return cls(dict(os.environ), _cores(), os.getcwd(), list(sys.path), job)


def _fork(address: str, theirs: Connection, main: Main, arguments: Sequence[Any]) -> Process | None:
    """Return the forked process; None if nobody listens at `address`, or if the fork server's environment
    differs."""
    job = pickle.dumps((main, arguments))
    if b"__main__" in job:
        return None
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(IMPORTING_SECONDS)
    try:
        channel.connect(address)
        request = pickle.dumps(Request.of(job))
        descriptors = [theirs.fileno(), sys.__stdout__.fileno(), sys.__stderr__.fileno()]  # type: ignore[union-attr]
        socket.send_fds(channel, [SIZE.pack(len(request))], descriptors)
        channel.sendall(request)
        answer = channel.recv(NUMBER.size)
    except OSError:
        answer = b""
    pid = NUMBER.unpack(answer)[0] if len(answer) == NUMBER.size else REFUSED
    if pid == REFUSED:
        channel.close()
        return None
    return ForkedProcess(channel, pid)


class ForkServer:
    """The process that forks: it has one thread, and no state besides its children."""

    def __init__(self, listener: socket.socket):
        self._environment = _read_while_imported(os.environ)
        self._cores = _cores()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._answer)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        """Serve until standard input closes; the command that started this process holds the input's other
        end.
        """
        while True:
            # One event at a time: it may close what another one is about.
            key, _ = self._selector.select()[0]
            key.data()

    def _answer(self) -> None:
        channel, _ = self._listener.accept()
        channel.settimeout(REQUEST_SECONDS)
        try:
            request, descriptors = _receive(channel)
        except (OSError, EOFError, pickle.UnpicklingError):
            channel.close()
            return
        alike = (_read_while_imported(request.environment), request.cores) == (self._environment, self._cores)
        with contextlib.suppress(OSError):  # no more processes to be had, or the client is gone
            if alike:
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    self._be_the_child(request, descriptors)
                self._watch(pid, channel)
            else:
                channel.sendall(NUMBER.pack(REFUSED))
                channel.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _watch(self, pid: int, channel: socket.socket) -> None:
        """Tell the client how its process ended; end the process if the client has gone."""
        pidfd = os.pidfd_open(pid)

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            with contextlib.suppress(KeyError):
                self._selector.unregister(channel)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                channel.sendall(NUMBER.pack(status))
            channel.close()

        def left() -> None:
            self._selector.unregister(channel)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

        self._selector.register(pidfd, selectors.EVENT_READ, ended)
        self._selector.register(channel, selectors.EVENT_READ, left)
        with contextlib.suppress(OSError):
            channel.sendall(NUMBER.pack(pid))

    def _be_the_child(self, request: Request, descriptors: Sequence[int]) -> None:
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            connection = Connection(descriptors[0])
            os.open(os.devnull, os.O_RDONLY)  # becomes standard input, which was just closed
            for number, descriptor in enumerate(descriptors[1:], start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request.environment)
            os.chdir(request.folder)
            sys.path[:] = request.path
            signal.signal(signal.SIGINT, signal.default_int_handler)
            random.seed()
            main, arguments = pickle.loads(request.job)
            main(connection, *arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _end(self) -> None:
        os._exit(0)


def _receive(channel: socket.socket) -> tuple[Request, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(channel, SIZE.size, 3)
    if len(header) < SIZE.size:
        raise EOFError
    left = SIZE.unpack(header)[0]
    parts = []
    while left:
        parts.append(channel.recv(min(left, 1 << 20)))
        if not parts[-1]:
            raise EOFError
        left -= len(parts[-1])
    return pickle.loads(b"".join(parts)), descriptors


def _read_while_imported(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_WHILE_IMPORTED) and name not in SET_BY_IMPORTS
    }


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def main(listener: int, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ForkServer(socket.socket(fileno=listener))
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
