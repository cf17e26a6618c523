"""A server's processes, their CPU time, and stopping them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from scalegate.serving_check.adapters import machine_cpu
from scalegate.serving_check.adapters.cpu_time import (
    PROC,
    computing_threads,
    cpu_seconds,
    own_processes,
    paused,
    server_processes,
    usable_by,
)
from scalegate.serving_check.adapters.machine_cpu import CoresTime, cores_time

pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="reads Linux's /proc")

SPIN = "while True: pass"
SPIN_IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
SECONDS = 0.5
"""Many ticks of the clock that CPU time is counted by, which are 0.01 s each."""


@contextmanager
def started(code: str, log: Path) -> Iterator[subprocess.Popen]:
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output)
    try:
        yield process
    finally:
        below = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        for each in [process, *below]:
            each.kill()
        process.wait()


SPIN_ON_THREE_THREADS = """
import sys, threading, time
sys.setswitchinterval(1e-4)
def spin():
    while True: sum(range(1000))
for _ in range(3): threading.Thread(target=spin).start()
time.sleep(1000)
"""


def used(processes: list[int]) -> float:
    before = cpu_seconds(processes)
    time.sleep(SECONDS)
    return cpu_seconds(processes) - before


def test_what_a_process_computes_counts_and_stops_while_it_is_paused(tmp_path: Path):
    with started(SPIN, tmp_path / "log") as spinning:
        assert used([spinning.pid]) > 0.1 * SECONDS
        with paused([spinning.pid]):
            assert psutil.Process(spinning.pid).status() == psutil.STATUS_STOPPED
            assert used([spinning.pid]) == 0.0
        assert used([spinning.pid]) > 0.1 * SECONDS


def test_a_process_that_has_ended_is_left_out(tmp_path: Path):
    with started("pass", tmp_path / "log") as ending:
        ending.wait()
        with paused([ending.pid]):
            assert cpu_seconds([ending.pid]) == 0.0


def test_descendants_and_writers_to_the_log_are_a_servers(tmp_path: Path):
    with (
        started(SPIN_IN_A_CHILD, tmp_path / "log") as supervisor,
        started(SPIN, tmp_path / "log") as forked_elsewhere,
        started(SPIN, tmp_path / "other") as stranger,
    ):
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(supervisor.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = server_processes(supervisor.pid, tmp_path / "log")
        assert sorted(found) == sorted([children[0].pid, forked_elsewhere.pid])
        assert stranger.pid not in found


def test_threads_that_compute_are_counted_and_those_that_wait_are_not(tmp_path: Path):
    with (
        started(SPIN_ON_THREE_THREADS, tmp_path / "log") as computing,
        started("import time; time.sleep(1000)", tmp_path / "log") as waiting,
    ):
        # Threads that were started one after another get even shares of a busy machine in the long run alone.
        found, deadline = None, time.monotonic() + 60
        while found != 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            found = computing_threads([waiting.pid, computing.pid])
        assert found == 3
    assert computing_threads([]) is None


def test_a_process_may_run_on_the_cores_that_it_was_bound_to(tmp_path: Path):
    core = min(psutil.Process().cpu_affinity() or [])
    with started("import time; time.sleep(1000)", tmp_path / "log") as bound:
        psutil.Process(bound.pid).cpu_affinity([core])
        assert usable_by([bound.pid]) == {core}
        assert bound.pid in own_processes()
    assert usable_by([]) == set() == usable_by([bound.pid])


def test_time_of_cores_is_read_column_by_column_and_only_of_those_asked_for(tmp_path: Path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine_cpu, "STAT", stat)
    monkeypatch.setattr(machine_cpu.os, "sysconf", lambda name: 100)
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 10 40 5000 7 30 20 50 3 0\ncpu1 1 1 1 1 1 1 1 100 0 0\nintr 5\n"
    )
    assert cores_time([0]) == CoresTime(busy=2.0, stolen=0.5)
    assert cores_time([0, 1]) == CoresTime(busy=2.05, stolen=1.5)
    assert cores_time([0, 7]) is None
    assert CoresTime(3.0, 1.0).since(CoresTime(2.0, 0.75)) == CoresTime(1.0, 0.25)
    stat.unlink()
    assert cores_time([0]) is None
