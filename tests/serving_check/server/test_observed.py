"""What goes wrong on a real server is seen by the checks: a compilation, a limit that keeps requests out."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.checks.compilations import check_compilations, compilations
from scalegate.serving_check.checks.kv_capacity import kv_cache_tokens
from scalegate.serving_check.checks.reached import check_reached, most_running
from scalegate.serving_check.evidence.curve import serving_figures
from scalegate.serving_check.evidence.measurement import Repeat
from scalegate.serving_check.settings import Bounds
from scalegate.serving_check.workload import WorkloadResult, WorkloadSpec, run_workload

from ..gate_samples import sample_verdict

pytestmark = pytest.mark.long

RECOMPILING_SERVER = Path(__file__).with_name("recompiling_server.py")
LIMIT = 4
OPTIONS = ["--max-num-seqs", str(LIMIT), "--max-model-len", "128", "--kv-cache-tokens", "4096"]


def recompiling(checkpoint: Path, folder: Path, *options: str) -> SubprocessEndpoint:
    command = [sys.executable, "-P", str(RECOMPILING_SERVER), str(checkpoint), "--port", "0"]
    command += ["--device", "cpu", *OPTIONS, *options]
    return SubprocessEndpoint(command, "recompiling", log=folder / "log.txt", progress=False)


@pytest.fixture(scope="module")
def limited(example_checkpoint: Path, serve_command, tmp_path_factory: pytest.TempPathFactory):
    """It runs four requests at most."""
    log = tmp_path_factory.mktemp("limited") / "log.txt"
    command = serve_command(example_checkpoint, *OPTIONS)
    with SubprocessEndpoint(command, str(example_checkpoint), log=log, progress=False) as endpoint:
        yield endpoint


def load(endpoint: Endpoint, m: int):
    return run_workload(
        endpoint, WorkloadSpec(m=m, num_requests=m, input_len=16, output_len=48, sample_interval=0.02)
    )


def three_together(endpoint: Endpoint, seen: Callable[[WorkloadResult], bool]) -> WorkloadResult:
    """The load at which what is looked for was `seen`: on a busy machine three may come one after another."""
    for _ in range(20):
        if seen(result := load(endpoint, 3)):
            return result
    raise AssertionError("three requests never got a token together, or nobody noticed")


@pytest.mark.exhaustive
def test_what_compiles_in_traffic_fails_by_kernel_and_key(example_checkpoint: Path, tmp_path: Path):
    # A server of its own: three requests together may have come to another one before.
    with recompiling(example_checkpoint, tmp_path) as endpoint:
        before = compilations(endpoint.metrics())
        load(endpoint, 2)
        assert check_compilations(before, compilations(endpoint.metrics())).status == "pass"
        three_together(endpoint, lambda _: compilations(endpoint.metrics()) != before)
        after = compilations(endpoint.metrics())
    result = check_compilations(before, after)
    assert result.status == "fail"
    assert "dynamo compilation of specialized_on_a_size (recompiling_server.py:" in result.reason
    assert "compile id" in result.reason
    assert check_compilations(after, after).status == "pass"


@pytest.mark.exhaustive
def test_a_server_told_to_end_on_a_compilation_says_why(example_checkpoint: Path, tmp_path: Path):
    with recompiling(example_checkpoint, tmp_path, "--jit-monitor", "error") as endpoint:
        result = three_together(endpoint, lambda result: bool(result.errors))
    assert len(result.errors) == 3
    assert "compiled while serving; dynamo compilation: specialized_on_a_size" in result.errors[0]


def test_a_limit_below_m_fails_with_the_queue_beside_an_empty_kv_cache(limited: Endpoint):
    result = load(limited, 16)
    assert result.errors == []
    samples = limited.metrics()
    figures = serving_figures([Repeat.of(result)])
    capped = replace(sample_verdict({16: 1.0}).curve[0], artifact=figures)
    check = check_reached([capped], Bounds().min_reached, most_running(samples))
    assert check.status == "fail"
    assert re.match(r"M=16: (4|3\.\d+) running, \d+ waiting, KV \d% used", check.measured)
    assert f"at most {LIMIT} requests together" in check.reason
    assert figures.waiting_mean is not None and figures.waiting_mean > LIMIT
    assert figures.kv_usage_max is not None and figures.kv_usage_max < 0.1
    assert kv_cache_tokens(samples) == 4096


def test_the_engines_own_times_reach_the_client(limited: Endpoint):
    work = load(limited, 2).engine
    assert work.step_ms is not None and work.host_ms is not None
    assert 0 < work.host_ms < work.step_ms
    assert work.device_idle_share is None, "a CPU has no device to leave idle"
