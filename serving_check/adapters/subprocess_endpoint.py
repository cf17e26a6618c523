"""An engine started as a process of our own: its log, its readiness, its end, and never an orphan.

Each engine's file gives the command of its engine.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...base.errors import UserError
from ...base.log import logger
from ...base.progress import progress_bar
from .cpu_time import server_processes
from .endpoint import Endpoint, first_model, is_healthy
from .process_memory import resident_bytes_of_tree
from .ready_line import find_base_url
from .series import SCALEGATE_SERIES, Series

SUPERVISOR = Path(__file__).with_name("supervisor.py")
LOG_TAIL_LINES = 25
LAST_LINE_CHARS = 200
ENDING_SECONDS = 20.0
"""How long a server may take to end if its engine is gone: vLLM looks for its engine every five seconds."""
PORT_OPTION = "--port"
KILLED = {256 - number: number.name for number in (signal.SIGKILL, signal.SIGTERM)}
"""The supervisor's exit statuses for a command that a signal from elsewhere ended."""
CLICK_ERROR = "Error: "
"""The beginning of the error message of a command that uses click."""


@dataclass(frozen=True)
class LogReader:
    """Functions that read facts from an engine's log; an engine leaves out what its log does not tell."""

    stage: Callable[[str], str | None] = lambda log: None
    """The stage that the start has reached."""
    failure: Callable[[str], str | None] = lambda log: None
    """The cause of a failed start and a remedy, in one line."""
    ending: Callable[[str], str | None] = lambda log: None
    """The cause of the server's end while it served, if it was the machine; None if a request was the
    cause."""
    series: Callable[[Path], Mapping[str, float]] = lambda log: {}
    """Figures from the log, as `/metrics` would contain them."""
    kernels: Callable[[Path], tuple[str, ...]] = lambda log: ()
    """The kernels that the log names."""


@dataclass(frozen=True)
class Telemetry:
    """How to read a server's figures from its metrics and its log."""

    series: Series = SCALEGATE_SERIES
    renewal_s: float = 0.0
    """For how many seconds, at most, `/metrics` shows old figures after the last request has ended."""
    log: LogReader = LogReader()


OUR_TELEMETRY = Telemetry()


class SubprocessEndpoint:
    """A server under a supervisor process that ends it when we say so, and when we die.

    `base_url` None means that the command binds a port of its own choosing and prints it in its ready line,
    which is the only way without a race; a URL is for engines that cannot do so.
    """

    stop_timeout = 30.0
    """Seconds between SIGTERM and SIGKILL."""
    api_key: str | None = None
    """The API key. It must be set before the start of a server that asks for one."""

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        log: Path,
        base_url: str | None = None,
        env: dict[str, str] | None = None,
        startup_timeout: float = 1800.0,
        progress: bool = True,
        telemetry: Telemetry = OUR_TELEMETRY,
    ):
        self.command = list(command)
        self.name = name
        self.log = log
        self.base_url = base_url
        self.env = env
        self.startup_timeout = startup_timeout
        self.progress = progress
        self.telemetry = telemetry
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_pipe: IO[bytes] | None = None

    def start(self) -> Endpoint:
        """Start the command and wait until it serves. A process that ends first raises UserError with the end
        of the log."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} is already started")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        logger.debug(f"starting {self.name}; its log: {self.log}")
        environment = {**os.environ, **(self.env or {})}
        supervised = [sys.executable, "-S", "-P", str(SUPERVISOR), str(self.stop_timeout), *self.command]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                supervised,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._stop_pipe = self._process.stdin
        try:
            base_url = self._wait_until_ready()
            model = first_model(base_url, self.api_key)
            from_log = functools.partial(self.telemetry.log.series, self.log)
            kernels = functools.partial(self.telemetry.log.kernels, self.log)
            return Endpoint(
                base_url,
                model,
                self.api_key,
                self.telemetry.series,
                from_log=from_log,
                kernels=kernels,
                resident_bytes=self.resident_bytes,
                metrics_renewal_s=self.telemetry.renewal_s,
                processes=self.processes,
            )
        except BaseException:
            self.stop()
            raise

    @property
    def keeps_address(self) -> bool:
        """Say whether the server's endpoint is still valid after a restart: its command can be given the
        port.
        """
        return self.base_url is not None or PORT_OPTION in self.command

    def restart(self) -> None:
        """End the server and start it again at the same address; only for a server with `keeps_address`."""
        running = self.base_url or find_base_url(self.log)
        if running is None:
            raise RuntimeError(f"{self.name} has never served")
        self.stop()
        if PORT_OPTION in self.command:
            self.command[self.command.index(PORT_OPTION) + 1] = running.rpartition(":")[2]
        self.start()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after `stop_timeout`, to the whole process group; calling this twice is
        safe.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if self._stop_pipe is not None:
            self._stop_pipe.close()
        try:
            process.wait(self.stop_timeout + 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def resident_bytes(self) -> int | None:
        """Return the resident bytes of all processes of the server; None while it is not running. The
        function can also be called after a restart of the server.
        """
        return None if self._process is None else resident_bytes_of_tree(self._process.pid)

    def processes(self) -> list[int]:
        """Return the ids of the server's processes, without the supervisor; empty while it is not running."""
        return [] if self._process is None else server_processes(self._process.pid, self.log)

    def why_gone(self) -> str | None:
        """Return the reason why the server ended, if that was the machine or a lack of memory rather than a
        request.

        The reason is None while the server serves, and if there is no evidence. A server that no longer
        serves gets some time to end.
        """
        if self._process is None or (self.is_running() and self._serves()):
            return None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        status = self._process.poll()
        if status in KILLED:
            return (
                f"{self.name} was ended by {KILLED[status]} while it served; the machine may be out of memory"
            )
        ending = self.telemetry.log.ending(self._log_text())
        return None if ending is None else f"{self.name} ended while it served: {ending}"

    def _serves(self) -> bool:
        base_url = self.base_url or find_base_url(self.log)
        return base_url is not None and is_healthy(base_url)

    def log_tail(self) -> str:
        """Return the last lines of the engine's log, for an error message; only the engine's own error if it
        gave one.
        """
        lines = self._log_text().splitlines()[-LOG_TAIL_LINES:]
        errors = [index for index, line in enumerate(lines) if line.startswith(CLICK_ERROR)]
        if errors:
            lines = [lines[errors[-1]].removeprefix(CLICK_ERROR), *lines[errors[-1] + 1 :]]
        return "\n".join(lines)

    def _log_text(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def _last_words(self) -> str:
        failure = self.telemetry.log.failure(self._log_text())
        if failure is not None:
            return f": {failure} (its log: {self.log})"
        return f". Its last words (all in {self.log}):\n{self.log_tail()}"

    def _last_line(self) -> str:
        """Return the last line in the log of a server that neither serves nor ends."""
        said = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        return f"it last said {said[-1][-LAST_LINE_CHARS:]!r}" if said else "it has said nothing"

    def __enter__(self) -> Endpoint:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> str:
        started = time.monotonic()
        pause = 0.05
        with progress_bar(
            desc=f"starting {self.name}", unit="s", shown=self.progress, bar_format="{desc}: {elapsed}"
        ) as bar:
            while True:
                base_url = self.base_url or find_base_url(self.log)
                if base_url is not None and is_healthy(base_url):
                    return base_url
                if not self.is_running():
                    raise UserError(f"{self.name} ended before it served{self._last_words()}")
                if time.monotonic() - started > self.startup_timeout:
                    raise UserError(
                        f"{self.name} did not serve within {self.startup_timeout:.0f} s: "
                        f"{self._last_line()}; allow more time with --startup-timeout, or look for the cause "
                        f"in the server's log: {self.log}"
                    )
                time.sleep(pause)
                pause = min(pause * 1.2, 0.5)
                stage = self.telemetry.log.stage(self._log_text()) if self.progress else None
                bar.set_description_str(f"starting {self.name}" + (f" ({stage})" if stage else ""))
