"""Each server is measured while the processes of the other one are stopped."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.adapters.cpu_time import PROC
from scalegate.serving_check.evidence.measurement import MeasuredM
from scalegate.serving_check.gate.alone import measure_alone
from scalegate.serving_check.gate.interleaving import Servers
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.serving_check.workload import WorkloadSpec

from ..gate_samples import ARTIFACT, BASELINE, load_result

pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="reads Linux's /proc")


SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.fixture
def processes() -> Iterator[dict[str, psutil.Process]]:
    started = {
        endpoint.model: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        for endpoint in (ARTIFACT, BASELINE)
    }
    yield {model: psutil.Process(process.pid) for model, process in started.items()}
    for process in started.values():
        process.kill()
        process.wait()


def test_the_other_server_is_stopped_and_goes_on_afterwards(processes: dict[str, psutil.Process]):
    seen = []

    def run(endpoint: Endpoint, spec: WorkloadSpec):
        stopped = [model for model, process in processes.items() if process.status() == psutil.STATUS_STOPPED]
        seen.append((endpoint.model, stopped))
        return load_result(spec.m, 100, output_len=spec.output_len)

    sides = [
        replace(endpoint, processes=lambda model=endpoint.model: [processes[model].pid])
        for endpoint in (ARTIFACT, BASELINE)
    ]
    workload = WorkloadSettings((1, 4))
    servers = Servers(*sides, workload, list(range(1000)), Repeats(run, *sides, None))
    level = MeasuredM(4)
    assert measure_alone(servers, level, 2)
    alone = [("artifact", ["baseline"]), ("baseline", ["artifact"])]
    assert seen == [*alone, *reversed(alone)]
    assert [len(block.artifact) + len(block.baseline) for block in level.blocks] == [2, 2]
    assert all(process.status() != psutil.STATUS_STOPPED for process in processes.values())
    assert level.blocks[0].artifact[0].idle_cpu_seconds == 0.0


def test_cpu_time_that_the_idle_server_uses_is_found(processes: dict[str, psutil.Process]):
    with subprocess.Popen([sys.executable, "-c", SPIN]) as spinning:
        artifact = replace(ARTIFACT, processes=lambda: [spinning.pid])
        baseline = replace(BASELINE, processes=lambda: [processes[BASELINE.model].pid])

        def run(endpoint: Endpoint, spec: WorkloadSpec):
            time.sleep(0.3)
            return load_result(spec.m, 100)

        repeats = Repeats(run, artifact, baseline, None)
        spec = WorkloadSpec(m=1, num_requests=1, input_len=8, output_len=64)
        beside_spinning, beside_sleeping = (repeats(side, spec) for side in (baseline, artifact))
        spinning.kill()
    assert beside_sleeping.idle_cpu_seconds == 0.0 < 0.01 < beside_spinning.idle_cpu_seconds


def test_cpu_time_of_processes_that_are_neither_servers_nor_the_clients_is_found(processes):
    """An orphan, as any other program of this machine: it is below nobody's process."""
    command = f"subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=subprocess.DEVNULL)"
    orphan = f"import subprocess, sys; print({command}.pid)"
    started = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, check=True)
    neighbour, seconds = psutil.Process(int(started.stdout)), 0.3

    def run(endpoint: Endpoint, spec: WorkloadSpec):
        before, deadline = sum(neighbour.cpu_times()[:2]), time.monotonic() + 60
        while sum(neighbour.cpu_times()[:2]) < before + seconds and time.monotonic() < deadline:
            time.sleep(0.05)
        return load_result(spec.m, 100)

    sides = [
        replace(endpoint, processes=lambda model=endpoint.model: [processes[model].pid])
        for endpoint in (ARTIFACT, BASELINE)
    ]
    try:
        repeat = Repeats(run, *sides, None)(sides[0], WorkloadSpec(1, 1, input_len=8, output_len=64))
    finally:
        neighbour.kill()
    ticks = 0.1  # of 0.01 s each: the cores' time, and that of each process, are counted in them
    assert repeat.others_cpu_seconds >= seconds - ticks
    assert repeat.stolen_seconds >= 0.0


def test_a_server_of_somebody_else_is_not_stopped():
    def run(endpoint: Endpoint, spec: WorkloadSpec):
        raise AssertionError("it was measured")

    servers = Servers(
        ARTIFACT, BASELINE, WorkloadSettings((1,)), [1, 2], Repeats(run, ARTIFACT, BASELINE, None)
    )
    level = MeasuredM(1)
    assert not measure_alone(servers, level, 2) and not level.blocks
