"""Servers looked at before and after a load, over loopback: sound ones, and ones that keep things or tire."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.checks.in_use.at_rest import check_at_rest
from scalegate.serving_check.checks.in_use.drift import check_drift
from scalegate.serving_check.evidence.at_rest import AtRestFigures
from scalegate.serving_check.evidence.measurement import Block, MeasuredM, Repeat
from scalegate.serving_check.gate import at_rest
from scalegate.serving_check.gate.at_rest import Sides, look_after, look_before
from scalegate.serving_check.gate.interleaving import workload_spec
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.serving_check.workload import run_workload
from scalegate.serving_check.workload.planned_request import Kind
from scalegate.tests.exhaustive import exhaustive_but

from ..gate_samples import load_result

pytestmark = pytest.mark.long

TIRING_SERVER = Path(__file__).parents[1] / "tiring_server.py"
WORKLOAD = WorkloadSettings(ms=(1, 4), input_len=16, output_len=8, seed=3)
TEXT = tuple(range(1, 400))
CONTEXT = {"tiring": 4096, "pycode": 512}
"""Of the server by this name. The tiring one makes a thousand tokens a second."""
BLOCKS = 9


@pytest.fixture(autouse=True)
def short_burst(monkeypatch: pytest.MonkeyPatch):
    """Few requests, in parts that are never cut short: the engine tires in the middle of them."""
    monkeypatch.setattr(at_rest, "FIRST_REQUESTS", 40)
    monkeypatch.setattr(at_rest, "MOST_IN_A_PART", 20)
    monkeypatch.setattr(at_rest, "PART_S", 10.0)
    monkeypatch.setattr(at_rest, "SEEN_REQUESTS", 0)
    monkeypatch.setattr(at_rest, "PATIENCE_S", 1.0)


@contextlib.contextmanager
def serving(fault: str, folder: Path) -> Iterator[Endpoint]:
    command = [sys.executable, "-P", str(TIRING_SERVER), fault]
    with SubprocessEndpoint(command, fault, log=folder / f"{fault}.txt", progress=False) as endpoint:
        yield endpoint


def looked_at(artifact: Endpoint, baseline: Endpoint | None) -> AtRestFigures:
    """Some blocks at the smallest M, one request whose client leaves, and the looks before and after it."""
    repeat = Repeats(run_workload, artifact, baseline, None)
    level = MeasuredM(1)
    for seed in range(BLOCKS):
        spec = workload_spec(WORKLOAD, 1, TEXT, seed)
        theirs = [] if baseline is None else [repeat(baseline, spec)]
        level.blocks.append(Block([repeat(artifact, spec)], theirs))
    before = look_before(artifact)
    leave_early(artifact)
    kinds: tuple[Kind, ...] = ("greedy", "sampled", "aborted")
    sides = Sides(artifact, baseline, WORKLOAD, TEXT, repeat, kinds, CONTEXT[artifact.model])
    return look_after(sides, [level], before, requests=1)


def leave_early(endpoint: Endpoint) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    if endpoint.model == "tiring":
        body["max_tokens"] = 4000  # it makes a thousand tokens a second
    with httpx.stream("POST", endpoint.base_url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())


def test_a_real_server_lets_go_of_an_aborted_request_and_keeps_its_speed(server: Endpoint):
    figures = looked_at(server, None)
    at_the_end, drift = check_at_rest(figures), check_drift(figures)
    assert at_the_end.status == "pass", at_the_end.reason
    assert "does not tell" not in at_the_end.reason
    # On a busy machine a sound server may seem slower: that is for `drift` to judge, on a quiet one.
    assert drift.status != "unknown"
    assert len(figures.burst) >= at_rest.PARTS
    in_burst = at_rest.FIRST_REQUESTS + sum(part.requests for part in figures.burst)
    assert figures.requests == 1 + in_burst + len(figures.last) + at_rest.LEFT_AT_END


@pytest.mark.parametrize(
    ("fault", "words"),
    exhaustive_but(
        [
            ("keeps_pages", "of the KV cache is in use, 0.00% before"),
            ("keeps_requests", "requests run and 0 wait"),
            ("runs_on", "or go on without their client"),
            ("keeps_memory", "with every request"),
            ("keeps_memory_of_sampled", "with every request"),
        ],
        ("keeps_requests", "requests run and 0 wait"),
        ("keeps_memory", "with every request"),
    ),
)
def test_a_server_that_keeps_something_is_caught_by_what_it_keeps(tmp_path: Path, fault: str, words: str):
    with serving(fault, tmp_path) as artifact:
        figures = looked_at(artifact, None)
    result = check_at_rest(figures)
    assert result.status == "fail"
    assert words in result.reason
    if fault.startswith("keeps_memory"):
        assert len(figures.burst) == at_rest.PARTS + at_rest.CONFIRMING_PARTS


def test_answers_must_end_sooner_than_they_would_by_themselves():
    """A fast server of a short context writes them in less time than others need to notice."""
    fast, slow = (Repeat.of(load_result(1, speed, output_len=64)) for speed in (1000.0, 100.0))
    assert at_rest._patience([slow, fast], 1600) == pytest.approx(0.8 * 0.86, rel=0.02)
    assert at_rest._patience([slow], 1600) == at_rest.PATIENCE_S
    assert at_rest._patience([fast], 10) == at_rest.LEAST_PATIENCE_S
    assert at_rest._patience([], 10) == at_rest.PATIENCE_S


def test_a_server_that_tires_is_caught_by_burst_and_first_m(tmp_path: Path):
    with serving("tires", tmp_path) as artifact, serving("none", tmp_path) as baseline:
        figures = looked_at(artifact, baseline)
    result = check_drift(figures)
    assert result.status == "fail"
    assert "of the burst on" in result.reason
    assert "M=1 takes" in result.reason
    assert check_at_rest(figures).status == "pass"
    # Both servers' parts and repeats are side by side.
    assert len(figures.baseline_burst) == len(figures.burst)
    assert len(figures.first) == len(figures.baseline_first) == BLOCKS
    assert len(figures.last) == len(figures.baseline_last) >= 6


@pytest.mark.parametrize(("renewal_s", "running"), [(60.0, 0.0), (0.0, 1.0)])
def test_figures_that_are_renewed_late_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, renewal_s: float, running: float
):
    began = time.monotonic()

    def metrics(endpoint: Endpoint) -> dict[str, float]:
        return {"vllm:num_requests_running": float(time.monotonic() < began + 0.5)}

    monkeypatch.setattr(at_rest, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Endpoint, "metrics", metrics)
    endpoint = Endpoint("http://127.0.0.1:1", "idle", metrics_renewal_s=renewal_s)
    assert look_before(endpoint).running == running
