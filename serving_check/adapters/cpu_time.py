"""The processes of a server that was started here: the CPU time that they use, and stopping them for a while.

The figures come from Linux's `/proc`; on other systems no processes are found.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
OUTPUTS = (1, 2)
"""The file descriptors through which a server writes its log."""
STOPPED = "TtZX"
"""The states of processes that are stopped or have ended."""
STOPPING_SECONDS, POLL_SECONDS = 1.0, 0.001
"""How long to wait until a process has stopped. It stops at once, unless it is waiting for a disk."""


@dataclass(frozen=True)
class _Status:
    """The figures in `/proc/PID/stat` of a process."""

    state: str
    parent: int
    ticks: int
    """CPU time of the process and of its children that have ended, in clock ticks."""


def server_processes(supervisor: int, log: Path) -> list[int]:
    """Return the ids of the processes below the supervisor, and of all others that write to the server's log.

    A fork server's children are not below the supervisor, but write their output to the same log.
    """
    statuses = _statuses()
    found = _below(supervisor, statuses)
    writers = [pid for pid in statuses if pid not in (supervisor, *found) and _writes_to(pid, log.resolve())]
    return [*found, *writers]


def cpu_seconds(processes: Sequence[int]) -> float:
    """Return the CPU time of the processes so far, with that of their children that have ended."""
    statuses = [_status(pid) for pid in processes]
    return sum(status.ticks for status in statuses if status is not None) / os.sysconf("SC_CLK_TCK")


def own_processes() -> list[int]:
    """Return the ids of this process and all processes below it."""
    return [os.getpid(), *_below(os.getpid(), _statuses())]


def usable_by(processes: Sequence[int]) -> set[int]:
    """Return the cores on which any of the processes may run; empty if they are not known."""
    found: set[int] = set()
    for pid in processes:
        with suppress(OSError, AttributeError):
            found |= os.sched_getaffinity(pid)
    return found


def computing_threads(processes: Sequence[int]) -> int | None:
    """Return the number of computing threads in the busiest process: those with at least half the CPU time of
    the busiest thread, since a product's threads share its work evenly. The result is None if the number is
    not known."""
    ticks = [_threads_ticks(pid) for pid in processes]
    busiest = max(ticks, key=sum, default=[])
    return sum(2 * used >= max(busiest) for used in busiest) or None


def _threads_ticks(pid: int) -> list[int]:
    """Return the CPU time of each thread of a process, in clock ticks."""
    with suppress(OSError):
        threads = [
            _status_in(PROC / str(pid) / "task" / name) for name in os.listdir(PROC / str(pid) / "task")
        ]
        return [status.ticks for status in threads if status is not None]
    return []


@contextmanager
def paused(processes: Sequence[int]) -> Iterator[None]:
    """Stop the processes while the `with` block runs. A process that has ended is skipped: its number may
    belong to another process.
    """
    try:
        _send(processes, signal.SIGSTOP)
        deadline = time.monotonic() + STOPPING_SECONDS
        while _any_runs(processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        yield
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _any_runs(processes: Sequence[int]) -> bool:
    statuses = [_status(pid) for pid in processes]
    return any(status is not None and status.state not in STOPPED for status in statuses)


def _statuses() -> dict[int, _Status]:
    if not PROC.is_dir():
        return {}
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]
    found = {pid: _status(pid) for pid in pids}
    return {pid: status for pid, status in found.items() if status is not None}


def _below(ancestor: int, statuses: Mapping[int, _Status]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, status in statuses.items():
        children.setdefault(status.parent, []).append(pid)
    found: list[int] = []
    below = list(children.get(ancestor, []))
    while below:
        pid = below.pop()
        found.append(pid)
        below += children.get(pid, [])
    return found


def _status(pid: int) -> _Status | None:
    """Return the figures of a process; None if it has ended."""
    return _status_in(PROC / str(pid))


def _status_in(folder: Path) -> _Status | None:
    """Return the figures of a process or a thread."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # proc_pid_stat(5): the name, in parentheses, may hold anything; the state is field 3, the times 14 to 17.
    fields = text.rpartition(")")[2].split()
    return _Status(fields[0], int(fields[1]), sum(map(int, fields[11:15])))


def _writes_to(pid: int, log: Path) -> bool:
    for descriptor in OUTPUTS:
        with suppress(OSError):
            if os.readlink(PROC / str(pid) / "fd" / str(descriptor)) == str(log):
                return True
    return False
