"""A server's processes, their CPU time, and stopping them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from scalegate.serving_check.adapters.cpu_time import PROC, cpu_seconds, paused, server_processes

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
