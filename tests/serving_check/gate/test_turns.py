"""Servers that take turns: simulated ones for the statistics, real processes of which one is up."""

import math
import random
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from scalegate.base.errors import UserError
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.endpoint import is_healthy
from scalegate.serving_check.adapters.taking_turns import TakingTurns
from scalegate.serving_check.checks.in_use.speed import check_speed_in_use
from scalegate.serving_check.evidence.answer_figures import TokenText
from scalegate.serving_check.evidence.curve import curve_of, took_turns
from scalegate.serving_check.evidence.measurement import MeasuredM
from scalegate.serving_check.gate import at_rest, in_use, profile_load
from scalegate.serving_check.gate import turns as turns_module
from scalegate.serving_check.gate.gate import GateRun, serve_in_turns
from scalegate.serving_check.gate.in_use import RequestSource
from scalegate.serving_check.gate.interleaving import SEEDS_PER_M
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.gate.turns import LEAST_BLOCKS, Turns, announce
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import GROUP, TURN_LOOKS, SequentialTest
from scalegate.serving_check.workload import run_workload

from ..gate_samples import ARTIFACT, BASELINE, RIVAL, simulated_run

pytestmark = pytest.mark.long

LOAD = WorkloadSettings((1, 8), max_blocks=LEAST_BLOCKS)
TEXT = list(range(500))
ENDPOINTS = {"artifact": ARTIFACT, "baseline": BASELINE, "rival": RIVAL}
WORDS = TokenText(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))
COUNTING = [sys.executable, "-P", str(Path(__file__).parents[1] / "counting_server.py"), "0.0001"]
QUIET = StageClock(shown=False)


class SimulatedServers:
    """Which side is up, and how often that changed."""

    up: str | None = None

    def __init__(self):
        self.starts: list[str] = []

    def take(self, side: str):
        if self.up != side:
            self.up = side
            self.starts.append(side)
        return ENDPOINTS[side]


def measured_in_turns(
    ratio: float, sides=("artifact", "baseline"), **more
) -> tuple[list[MeasuredM], list[str]]:
    run = simulated_run(lambda m: ratio, 0.02, **more)
    servers = SimulatedServers()
    repeats = Repeats(run, ARTIFACT, BASELINE, None)
    turns = Turns(servers, list(sides), LOAD, TEXT, repeats, 0.93, rival_from_m=4)  # type: ignore[arg-type]
    return turns.measure(QUIET), servers.starts


@pytest.mark.parametrize(("ratio", "status"), [(2.0, "pass"), (0.7, "fail")])
def test_groups_of_blocks_decide_and_each_side_starts_once_a_group(ratio: float, status: str):
    measured, starts = measured_in_turns(ratio)
    assert all(took_turns(level) for level in measured)
    points = curve_of(measured, LOAD, Bounds())
    statuses = {point.status for point in points}
    assert status in statuses and (status == "fail" or statuses == {"pass"}), "one failed M ends it"
    assert all(math.isclose(point.ratio, ratio, rel_tol=0.05) for point in points)
    groups = {block.restarts for level in measured for block in level.blocks}
    assert starts == ["baseline", "artifact"] * (len(starts) // 2) + ["baseline"] * (len(starts) % 2)
    assert len(starts) == len(groups) + 1, "who ends a group begins the next"
    assert all(len(level.blocks) == len(groups) * GROUP for level in measured)


def test_both_sides_of_a_block_get_the_same_prompts_and_warm_ups_others():
    sent: list[tuple[str, int, int, int]] = []
    simulated = simulated_run(lambda m: 2.0, 0.02)

    def recording(endpoint, spec):
        sent.append((endpoint.model, spec.m, spec.seed, spec.output_len))
        return simulated(endpoint, spec)

    repeats = Repeats(recording, ARTIFACT, BASELINE, None)
    turns = Turns(SimulatedServers(), ["artifact", "baseline"], LOAD, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    turns.measure(QUIET)
    full = [each for each in sent if each[3] == LOAD.output_len]
    of = {side: [each[1:] for each in full if each[0] == side] for side in ("artifact", "baseline")}
    assert sorted(of["artifact"]) == sorted(of["baseline"])
    assert len(set(of["artifact"])) == len(of["artifact"]), "every block has prompts of its own"
    warm = {each[1:3] for each in sent if each[3] < LOAD.output_len}
    assert warm and not warm & {each[:2] for each in of["artifact"]}


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_a_start_is_followed_by_as_many_warm_ups_as_were_asked_for(warmups: int):
    sent: list[int] = []
    simulated = simulated_run(lambda m: 2.0, 0.02)

    def recording(endpoint, spec):
        sent.append(spec.output_len)
        return simulated(endpoint, spec)

    load, servers = replace(LOAD, warmups=warmups), SimulatedServers()
    turns = Turns(
        servers, ["artifact", "baseline"], load, TEXT, Repeats(recording, ARTIFACT, BASELINE, None), 0.93
    )  # type: ignore[arg-type]
    turns.measure(QUIET)
    assert sum(length < LOAD.output_len for length in sent) == warmups * len(servers.starts) * len(LOAD.ms)


def test_drawn_ms_take_their_turns_with_shorter_requests():
    load, sent = replace(LOAD, draws_between=True, warmups=0), {}
    simulated = simulated_run(lambda m: 1.0 if m in LOAD.ms else 0.5, 0.02)

    def recording(endpoint, spec):
        sent[spec.m] = spec.output_len
        return simulated(endpoint, spec)

    repeats = Repeats(recording, ARTIFACT, BASELINE, None)
    turns = Turns(SimulatedServers(), ["artifact", "baseline"], load, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    measured = turns.measure(QUIET)
    assert sent == {m: load.at(m).output_len for m in load.measured_ms} and len(sent) == 5
    failed = {point.m for point in curve_of(measured, load, Bounds()) if point.status == "fail"}
    assert failed == set(load.ms_between)


def test_each_side_is_looked_at_once_before_it_is_sent_anything():
    seen: list[str] = []
    simulated = simulated_run(lambda m: 2.0, 0.02)

    def recording(endpoint, spec):
        seen.append(f"sent to {endpoint.model}")
        return simulated(endpoint, spec)

    repeats, servers = Repeats(recording, ARTIFACT, BASELINE, None), SimulatedServers()
    sides = ["artifact", "baseline"]

    def look(side, endpoint):
        seen.append(f"look at {side}, {endpoint.model}")

    turns = Turns(servers, sides, LOAD, TEXT, repeats, 0.93, when_first_up=look)  # type: ignore[arg-type]
    turns.measure(QUIET)
    assert len(servers.starts) > len(sides), "they are started again"
    for side in sides:
        assert [seen.count(f"look at {side}, {side}"), seen.count(f"sent to {side}") > 0] == [1, True]
        assert seen.index(f"look at {side}, {side}") < seen.index(f"sent to {side}")


@pytest.mark.parametrize(("walk", "status"), [(0.005, "pass"), (0.1, "inconclusive")])
def test_a_machine_that_walks_as_far_as_the_ratio_is_from_the_floor_decides_nothing(walk: float, status: str):
    """What it does to one side alone, group by group; the other case is the control."""
    simulated, steps = simulated_run(lambda m: 1.15, 0.01), random.Random(3)
    logs: list[float] = [0.0]

    def walking(endpoint, spec):
        result = simulated(endpoint, spec)
        group = spec.seed % SEEDS_PER_M // GROUP
        while len(logs) <= group:
            logs.append(logs[-1] + steps.gauss(0, walk))
        return (
            replace(result, duration=result.duration / math.exp(logs[group]))
            if endpoint == ARTIFACT
            else result
        )

    repeats = Repeats(walking, ARTIFACT, BASELINE, None)
    turns = Turns(SimulatedServers(), ["artifact", "baseline"], LOAD, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    measured = turns.measure(QUIET)
    assert {point.status for point in curve_of(measured, LOAD, Bounds())} == {status}


def test_one_bad_start_is_no_fail():
    """Its blocks are so slow that of servers side by side they would be one, without statistics."""
    simulated, servers = simulated_run(lambda m: 1.15, 0.01), SimulatedServers()

    def limping(endpoint, spec):
        result = simulated(endpoint, spec)
        limps = endpoint == ARTIFACT and servers.starts.count("artifact") == 1
        return replace(result, duration=result.duration * 4) if limps else result

    repeats = Repeats(limping, ARTIFACT, BASELINE, None)
    turns = Turns(servers, ["artifact", "baseline"], LOAD, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    measured = turns.measure(QUIET)
    assert all(level.first_looks[0] < math.log(0.93 / 2) for level in measured), "the control"
    assert {point.status for point in curve_of(measured, LOAD, Bounds())} == {"inconclusive"}


class CompilingEndpoint(Endpoint):
    """One compilation in every turn, and one in every warm-up."""

    looks = 0

    def metrics(self) -> dict[str, float]:
        CompilingEndpoint.looks += 1
        return {
            'scalegate:compilations_total{kind="triton",kernel="flush",key=""}': float(
                CompilingEndpoint.looks
            )
        }


def test_what_the_artifacts_server_compiles_in_its_turns_is_added_up(monkeypatch):
    artifact = CompilingEndpoint(ARTIFACT.base_url, ARTIFACT.model)
    monkeypatch.setitem(ENDPOINTS, "artifact", artifact)
    repeats = Repeats(simulated_run(lambda m: 2.0), artifact, BASELINE, None)
    turns = Turns(SimulatedServers(), ["artifact", "baseline"], LOAD, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    turns.measure(QUIET)
    assert turns.compiled == {"triton of flush": TURN_LOOKS[0]}, "one between the two looks of each group"


def test_a_rival_takes_its_turns_and_is_decided_by_groups():
    measured, starts = measured_in_turns(2.0, sides=("artifact", "baseline", "rival"), rival=lambda m: 0.5)
    assert set(starts) == set(ENDPOINTS)
    point = curve_of(measured, LOAD, Bounds())[1]
    assert point.rival is not None and point.rival.status == "pass"


@pytest.mark.parametrize(
    ("seconds", "said", "warned"),
    [
        (20, "a first decision after 4 groups, 80 s in all, and the last after 5 min", ""),
        (100, "after 4 groups, 7 min in all", "may take 27 min: .* in 7 min to 10 min. --max-blocks 42 ends"),
        (200, "after 4 groups, 13 min in all", "may take 53 min: .* in 13 min to 20 min. fewer Ms"),
    ],
)
def test_the_first_group_says_how_long_turns_take(caplog, seconds: float, said: str, warned: str):
    """And what makes them shorter where they may take more than twelve minutes."""
    with caplog.at_level("INFO"):
        announce(seconds, SequentialTest(0.93, 2).of_turns, StageClock())
    levels = {record.levelname: record.message for record in caplog.records}
    assert said in levels["INFO"]
    assert re.search(warned, levels["WARNING"]) if warned else "WARNING" not in levels


def test_turns_are_announced_once(monkeypatch: pytest.MonkeyPatch):
    announced: list[float] = []
    monkeypatch.setattr(turns_module, "announce", lambda seconds, groups, clock: announced.append(seconds))
    _, starts = measured_in_turns(2.0)
    assert len(announced) == 1 < len(starts)


def test_too_few_blocks_for_groups_are_refused_at_once():
    few = WorkloadSettings((1,), max_blocks=LEAST_BLOCKS - 1)
    repeats = Repeats(simulated_run(lambda m: 1.0), ARTIFACT, BASELINE, None)
    turns = Turns(SimulatedServers(), ["artifact", "baseline"], few, TEXT, repeats, 0.93)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"--max-blocks {LEAST_BLOCKS}"):
        turns.measure(QUIET)


@pytest.fixture
def counting(tmp_path: Path) -> dict[str, SubprocessEndpoint]:
    return {
        side: SubprocessEndpoint(
            [*COUNTING, "--port", "0"], side, log=tmp_path / f"{side}.log", progress=False
        )
        for side in ("artifact", "baseline")
    }


def test_of_real_servers_one_is_up_at_a_time_and_each_keeps_its_address(counting):
    turns = TakingTurns(counting)
    try:
        first = turns.take("artifact")
        assert [server.is_running() for server in counting.values()] == [True, False]
        turns.take("baseline")
        assert [server.is_running() for server in counting.values()] == [False, True]
        assert turns.take("artifact") == first == turns.endpoint("artifact")
        assert first.metrics(), "it answers at its old address"
    finally:
        turns.stop()
    assert not any(server.is_running() for server in counting.values())


def gate_run(load: WorkloadSettings, runner) -> GateRun:
    return GateRun(load, Bounds(throughput_floor=0.01), TEXT, WORDS, QUIET, runner)


def test_the_gate_measures_real_servers_in_turns(counting):
    load = WorkloadSettings((2,), 8, 8, max_blocks=LEAST_BLOCKS, seed=1)
    waits: dict[str, list[float]] = {"artifact": [], "baseline": []}

    def recording(endpoint, spec):
        waits[turns.up].append(spec.request_timeout)
        return run_workload(endpoint, spec)

    turns = TakingTurns(counting)
    try:
        served = serve_in_turns(turns, list(counting), gate_run(load, recording))
    finally:
        turns.stop()
    assert max(waits["artifact"]) < waits["baseline"][0], "an artifact is waited for as its baseline takes"
    assert len(served.canary) == len(served.baseline_canary) > 0
    [level] = served.measured
    assert (
        took_turns(level)
        and len(level.blocks) == LEAST_BLOCKS
        and not any(block.errors for block in level.blocks)
    )
    assert curve_of(served.measured, load, Bounds())[0].ratio_high is not None
    assert served.compiled == (None, None), "that server does not count"
    assert served.texts


@pytest.mark.exhaustive
@pytest.mark.parametrize("step_s", [0.0001, 0.03])
def test_a_load_as_in_use_is_sent_to_one_server_after_the_other(
    counting, monkeypatch: pytest.MonkeyPatch, step_s: float
):
    """Each is warmed up if it was started for it; an artifact that is slow in use alone fails."""
    for module, name in ((in_use, "LEAST_SECONDS"), (profile_load, "LEAST_PROFILE_S")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(in_use, "LEAST_REQUESTS", 1)
    monkeypatch.setattr(at_rest, "FIRST_REQUESTS", 20)
    monkeypatch.setattr(at_rest, "MOST_IN_A_PART", 20)
    load = WorkloadSettings((1, 4), 16, 8, max_blocks=LEAST_BLOCKS, seed=1, profile="chat")
    counting["artifact"].command[3] = str(step_s)
    sent: list[tuple[str, int, int]] = []

    def recording(endpoint, spec):
        sent.append((turns.up, spec.m, spec.output_len))
        return run_workload(endpoint, spec)

    source = RequestSource(512, None, None)
    turns = TakingTurns(counting)
    try:
        run = replace(gate_run(load, recording), source=source)
        served = serve_in_turns(turns, list(counting), run)
    finally:
        turns.stop()
    assert served.in_use is not None and served.at_rest is not None
    blocks = served.in_use.figures.blocks
    assert len(blocks) == in_use.BLOCKS and served.in_use.answers
    for block in blocks:
        assert block.artifact and block.baseline and not (block.artifact.errors or block.baseline.errors)
        assert len(block.artifact.ttfts) == len(block.baseline.ttfts) == block.requests
    profile = served.in_use.figures.profile
    assert profile is not None and profile.scale < 1 and len(profile.blocks) == profile_load.PROFILE_BLOCKS
    assert all(block.artifact.parts and block.baseline.parts for block in profile.blocks)
    assert served.at_rest.burst and not served.at_rest.baseline_burst and not served.at_rest.errors
    assert served.at_rest.last, "the first M once more"
    # A warm-up is shorter than a repeat.
    warm = [(side, m) for side, m, output_len in sent if output_len < load.output_len]
    assert warm[-2:] == [("artifact", 1), ("artifact", 4)]
    if step_s > 0.01:
        assert check_speed_in_use(blocks, Bounds()).status == "fail"


def test_an_artifact_is_looked_at_where_the_baselines_first_turn_has_failed(counting):
    load = WorkloadSettings((2,), 8, 8, max_blocks=LEAST_BLOCKS, seed=1)

    def failing(endpoint, spec):
        result = run_workload(endpoint, spec)
        if turns.up != "baseline":
            return result
        return replace(
            result, requests=tuple(replace(request, error="refused") for request in result.requests)
        )

    turns = TakingTurns(counting)
    try:
        served = serve_in_turns(turns, list(counting), gate_run(load, failing))
    finally:
        turns.stop()
    assert served.canary and served.baseline_canary
    assert any(block.errors for block in served.measured[0].blocks)


def test_a_pool_too_small_for_the_load_is_refused_at_its_servers_first_turn(counting):
    load = WorkloadSettings((8,), 3000, 8, max_blocks=LEAST_BLOCKS)
    turns = TakingTurns(counting)

    def never(endpoint, spec):
        pytest.fail("a load was sent")

    try:
        with pytest.raises(UserError, match=r"the baseline's server .*16000"):
            serve_in_turns(turns, list(counting), gate_run(load, never))
    finally:
        turns.stop()


def test_a_server_that_is_killed_says_so_and_one_that_ends_by_itself_does_not(counting, tmp_path: Path):
    killed = counting["artifact"]
    killed.start()
    for process in psutil.Process(killed._process.pid).children():
        process.kill()
    killed._process.wait(60)
    assert "ended by SIGKILL" in str(killed.why_gone())
    killed.stop()
    crashed = counting["baseline"]
    endpoint = crashed.start()
    assert crashed.why_gone() is None
    for process in psutil.Process(crashed._process.pid).children():
        process.send_signal(signal.SIGINT)
    crashed._process.wait(60)
    assert crashed.why_gone() is None and not is_healthy(endpoint.base_url)
    crashed.stop()
