"""The interleaved measuring and the judging, on simulated servers."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.evidence.artifact_figures import TextFigures
from scalegate.serving_check.evidence.evidence import Evidence, ModelFigures
from scalegate.serving_check.evidence.gaps import Gap, LongestGaps
from scalegate.serving_check.evidence.quality_figures import Comparison
from scalegate.serving_check.gate import gate
from scalegate.serving_check.gate.gate import GateRun, canary_prompts, serve_together
from scalegate.serving_check.gate.interleaving import Servers, measure, workload_spec
from scalegate.serving_check.gate.judge import judge
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS
from scalegate.serving_check.workload.prompts import prompts

from ..gate_samples import ARTIFACT, BASELINE, simulated_run

TEXT = list(range(500))
MS = (1, 2, 4, 8, 16, 32)


def run_gate(ratio, noise: float = 0.03, seed: int = 0, load: WorkloadSettings | None = None):
    load = load or WorkloadSettings(MS)
    return measured_by(simulated_run(ratio, noise, seed), load)


def measured_by(run, load: WorkloadSettings, restart=None):
    servers = Servers(ARTIFACT, BASELINE, load, TEXT, Repeats(run, ARTIFACT, BASELINE, None))
    return measure(servers, Bounds(), StageClock(shown=False), restart=restart)


def verdict_of(measured, decisions) -> tuple[str, dict]:
    loaded = ModelFigures({"up": (8, 8)}, 500)
    comparison = Comparison(100, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    blame = {level.m: f"blame {level.m}" for level in measured}
    evidence = Evidence(
        loaded, loaded, comparison, (), (), tuple(measured), None, TextFigures(), diagnoses=blame
    )
    judgement = judge(evidence, WorkloadSettings(MS), Bounds())
    assert [point.status for point in judgement.curve] == [
        decision.status
        for level, decision in zip(measured, decisions, strict=True)
        if level.artifact and level.baseline
    ], "judged as it was decided while it ran"
    return judgement.status, {check.name: check for check in judgement.checks}


def test_an_equal_artifact_passes_at_every_m():
    measured, decisions = run_gate(lambda m: 1.0)
    assert [decision.status for decision in decisions] == ["pass"] * len(MS)
    assert [level.m for level in measured] == list(MS)


@pytest.mark.parametrize("pauses", [True, False])
def test_one_that_surely_stalls_gets_no_more_than_its_first_look(pauses: bool):
    noisy = simulated_run(lambda m: 1.0, noise=0.4)

    def run(endpoint, spec):
        result = noisy(endpoint, spec)
        if endpoint == BASELINE or not pauses:
            return result
        stopped = [
            replace(request, itls=(60.0,), e2el=60.0 + (request.ttft or 0)) for request in result.requests
        ]
        return replace(result, requests=tuple(stopped))

    measured, decisions = measured_by(run, WorkloadSettings(MS))
    assert all(len(level.blocks) == LOOKS[0] for level in measured) == pauses
    assert not pauses or "inconclusive" in {decision.status for decision in decisions}


def test_an_artifact_that_served_briefly_is_watched_at_the_largest_m():
    load = WorkloadSettings((1, 2))
    servers = Servers(
        ARTIFACT, BASELINE, load, TEXT, Repeats(simulated_run(lambda m: 1.0), ARTIFACT, BASELINE, None)
    )
    clock = StageClock(shown=False)
    measured, _ = measure(servers, Bounds(), clock)
    served = math.fsum(repeat.duration for level in measured for repeat in level.artifact)
    run = GateRun(load, Bounds(), TEXT, None, clock, watched_s=served + 0.1)
    together = serve_together(servers, measured, run)
    assert together is not None and together.m == 2 and together.blocks
    for enough in (served, 0.0):
        assert serve_together(servers, measured, replace(run, watched_s=enough)) is None


@pytest.mark.parametrize(("stalled", "is_short"), [(1, True), (2, False)])
def test_a_single_stall_is_looked_at_more_briefly(
    monkeypatch: pytest.MonkeyPatch, stalled: int, is_short: bool
):
    load = WorkloadSettings((1,))
    servers = Servers(
        ARTIFACT, BASELINE, load, TEXT, Repeats(simulated_run(lambda m: 1.0), ARTIFACT, BASELINE, None)
    )
    clock = StageClock(shown=False)
    measured, _ = measure(servers, Bounds(), clock)
    stop = LongestGaps(Gap(0.0, 0.0), Gap(0.0, 60.0))
    for block in measured[0].blocks[:stalled]:
        block.artifact[0] = replace(block.artifact[0], gaps=stop)
    monkeypatch.setattr(gate, "SHORT_PATIENCE_S", 0.0)
    monkeypatch.setattr(gate, "PATIENCE_S", 0.5)
    together = serve_together(servers, measured, GateRun(load, Bounds(), TEXT, None, clock))
    assert together is not None and bool(together.blocks) != is_short


def test_one_that_is_slow_from_m_8_fails_there_with_a_diagnosis():
    measured, decisions = run_gate(lambda m: 0.6 if m >= 8 else 1.0, noise=0.01)
    status, checks = verdict_of(measured, decisions)
    assert status == "fail"
    assert {m: d.status for m, d in zip(MS, decisions, strict=True)}[8] == "fail"
    assert "M=8" in checks["throughput"].reason
    assert "blame 8" in checks["throughput"].reason


def test_what_is_decided_is_not_loaded_any_more():
    measured, decisions = run_gate(lambda m: 0.93 if m == 32 else 1.3, noise=0.05)
    blocks = {level.m: len(level.blocks) for level in measured}
    assert blocks[1] < blocks[32] == WorkloadSettings().max_blocks
    assert decisions[-1].status == "inconclusive"


def drawing(**changes) -> WorkloadSettings:
    return replace(WorkloadSettings(MS, seed=5, draws_between=True), **changes)


def test_a_kernel_that_is_slow_for_all_ms_but_powers_of_two_is_caught_at_those_that_are_drawn():
    def slow_between(m: int) -> float:
        return 1.0 if m in MS else 0.55

    for seed in range(20):
        load = drawing(seed=seed)
        measured, decisions = run_gate(slow_between, noise=0.05, seed=seed, load=load)
        failed = {
            level.m for level, decision in zip(measured, decisions, strict=True) if decision.status == "fail"
        }
        assert failed and failed <= set(load.ms_between), seed
    # The control: at the given Ms alone it passes.
    _, decisions = run_gate(slow_between, noise=0.05)
    assert {decision.status for decision in decisions} == {"pass"}


def test_drawn_ms_take_little_of_the_time_and_hold_no_sound_artifact_up():
    load, sent = drawing(), Counter()
    run = simulated_run(lambda m: 1.0, noise=0.05)

    def counting(endpoint, spec):
        sent[spec.m in MS] += spec.m * (spec.input_len + spec.output_len)
        return run(endpoint, spec)

    measured, decisions = measured_by(counting, load)
    assert {decision.status for decision in decisions} == {"pass"}
    assert sent[False] < sent[True] / 3
    assert all(len(level.blocks) <= LOOKS[1] for level in measured if level.m not in MS)


def test_a_drawn_m_passes_by_its_estimate_where_a_given_one_needs_confidence():
    def a_little_above(m: int) -> float:
        return 0.97 if m in (8, 13) else 1.3

    load = next(load for seed in range(100) if 13 in (load := drawing(seed=seed)).ms_between)
    measured, decisions = run_gate(a_little_above, noise=0.08, load=load)
    blocks = {level.m: len(level.blocks) for level in measured}
    assert blocks[13] < blocks[8]
    assert all(
        decision.status == "pass"
        for level, decision in zip(measured, decisions, strict=True)
        if level.m == 13
    )


def test_after_a_fail_the_others_are_not_pursued():
    measured, _ = run_gate(lambda m: 0.5 if m == 1 else 0.93, noise=0.05)
    assert max(len(level.blocks) for level in measured) <= 8


def test_repeats_alternate_and_both_sides_get_the_same_prompts():
    sent = []
    run = simulated_run(lambda m: 1.0)

    def recording(endpoint, spec):
        sent.append((endpoint.model, spec.seed))
        return run(endpoint, spec)

    measured_by(recording, WorkloadSettings((4,), warmups=0))
    assert [side for side, _ in sent[:8]] == ["artifact", "baseline", "baseline", "artifact"] * 2
    seeds = Counter(seed for _, seed in sent)
    assert set(seeds.values()) == {2}
    first, second = (next(prompts(workload_spec(WorkloadSettings(), 4, TEXT, seed))) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("slow_from", [1, 32])
def test_one_ten_times_slower_fails_after_a_short_look_and_a_second(slow_from):
    sent = Counter()
    run = simulated_run(lambda m: 0.1 if m >= slow_from else 1.0)

    def counting(endpoint, spec):
        sent[spec.m, spec.output_len] += 1
        return run(endpoint, spec)

    measured, decisions = measured_by(counting, WorkloadSettings(MS))
    assert {level.m: len(level.blocks) for level in measured if level.blocks} == {slow_from: 1}
    assert sent[slow_from, 64] == sent[slow_from, 16] == 2
    status, checks = verdict_of(measured, decisions)
    assert (status, checks["throughput"].status) == ("fail", "fail")
    assert f"M={slow_from}" in checks["throughput"].reason and "two blocks" in checks["throughput"].reason


def test_one_slow_first_look_decides_nothing():
    """The control: a server that is slow only until it is warm."""
    run, sent = simulated_run(lambda m: 1.0), Counter()

    def slow_at_first(endpoint, spec):
        sent[endpoint.model, spec.m] += 1
        slow = endpoint == ARTIFACT and sent[endpoint.model, spec.m] == 1
        result = run(endpoint, spec)
        return replace(result, duration=result.duration * 20) if slow else result

    _, decisions = measured_by(slow_at_first, WorkloadSettings(MS))
    assert {decision.status for decision in decisions} == {"pass"}


class DriftingServer:
    """The artifact's server, whose speed at each M walks at random from the one it was started with."""

    def __init__(self, ratio: float, step: float):
        self.random, self.step, self.starts = random.Random(1), step, 0
        self.run = simulated_run(lambda m: ratio, noise=0.0)
        self.restart()

    def restart(self):
        self.starts += 1
        self.logs = Counter()

    def __call__(self, endpoint, spec):
        result = self.run(endpoint, spec)
        if endpoint != ARTIFACT:
            return result
        self.logs[spec.m] += self.random.gauss(0, self.step)
        return replace(result, duration=result.duration / math.exp(self.logs[spec.m]))


@pytest.mark.parametrize(("ratio", "expected"), [(1.3, "pass"), (0.7, "fail")])
def test_servers_are_started_anew_where_their_blocks_resemble_each_other(ratio, expected):
    server = DriftingServer(ratio, 0.04)
    measured, decisions = measured_by(server, WorkloadSettings((1, 2, 4)), server.restart)
    # An M that fails ends the measuring, which may leave another one open.
    left_open = {"inconclusive"} if expected == "fail" else set()
    assert {decision.status for decision in decisions} - left_open == {expected}
    assert 6 < server.starts <= 12
    assert max(len(level.blocks) for level in measured) <= WorkloadSettings().max_blocks
    # The control: where they cannot be, something stays open.
    alone = DriftingServer(ratio, 0.04)
    _, decisions = measured_by(alone, WorkloadSettings((1, 2, 4)))
    assert "inconclusive" in {decision.status for decision in decisions}


def test_servers_are_left_alone_where_noise_is_all_there_is():
    run, restarts = simulated_run(lambda m: 0.93, noise=0.1), []
    measured_by(run, WorkloadSettings(MS), lambda: restarts.append(1))
    assert not restarts


def test_a_failed_request_ends_the_measuring_and_fails_the_gate():
    run = simulated_run(lambda m: 1.0)

    def failing(endpoint, spec):
        result = run(endpoint, spec)
        if endpoint == ARTIFACT and spec.m == 8:
            object.__setattr__(result.requests[0], "error", "HTTP 500")
        return result

    measured, decisions = measured_by(failing, WorkloadSettings(MS))
    status, checks = verdict_of(measured, decisions)
    assert status == "fail"
    assert checks["no failed requests"].status == "fail"
    assert checks["throughput"].status == "inconclusive"
    assert "a request failed at M=8" in checks["throughput"].reason
    assert not measured[-1].blocks


@pytest.mark.parametrize("length", [33, 100, 5000])
def test_canary_prompts_come_from_all_over_the_text(length):
    slices = canary_prompts(list(range(length)))
    assert all(len(prompt) == 32 for prompt in slices)
    assert len(set(slices)) == min(16, length - 32)
