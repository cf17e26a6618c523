"""Where prompts are long, decoding is decided by itself: a slow decode step hides behind their reading."""

import itertools
from dataclasses import replace

import pytest
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.checks.decode_throughput import NAME
from scalegate.serving_check.evidence.curve import binding_decisions_of
from scalegate.serving_check.evidence.measurement import Block, MeasuredM
from scalegate.serving_check.evidence.steady_decoding import steady_decoding
from scalegate.serving_check.gate.interleaving import Servers, measure
from scalegate.serving_check.gate.judge import judge
from scalegate.serving_check.gate.policy import weaker
from scalegate.serving_check.gate.record import contradictions
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS
from scalegate.serving_check.workload import RequestRecord, WorkloadResult, WorkloadSpec

from ..gate_samples import ARTIFACT, BASELINE, answered, load_result, sample_evidence, sample_verdict

LOAD = WorkloadSettings((1, 8), input_len=4096, decoding_apart=True)
READING, STEPS = 20.0, 64


def long_prompts(m: int, step: float, chunk: int = 1) -> WorkloadResult:
    """M prompts are read one after another, then all decode: `chunk` tokens every `step * chunk` seconds.

    While others are read, those before get a chunk with each.
    """
    requests = []
    for index in range(m):
        while_reading = [READING] * (m - 1 - index)
        decoding = [step * chunk] * ((STEPS - 1) // chunk - len(while_reading))
        first = READING * (index + 1)
        itls = (*while_reading, *decoding)
        requests.append(RequestRecord(0.0, first, itls, first + sum(itls), 1 + len(itls) * chunk, 8))
    ended = max(record.e2el for record in requests)
    result = load_result(m, m * STEPS / ended, output_len=STEPS)
    return replace(result, requests=tuple(requests), duration=ended)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("m", [1, 8])
def test_it_is_the_speed_of_the_steps_that_read_no_prompt(m: int, chunk: int):
    assert steady_decoding(long_prompts(m, 0.01, chunk)) == pytest.approx(m / 0.01, rel=0.02)
    assert steady_decoding(long_prompts(m, 0.02, chunk)) == pytest.approx(m / 0.02, rel=0.02)


def test_waves_count_from_the_first_chunk_of_whoever_came_last():
    """Two clients, of which one sends its next request while the other still decodes."""
    steady, meanwhile = (0.01,) * 31, (0.01,) * 15 + (1.0,) + (0.01,) * 15
    first = [RequestRecord(0.0, 1.0, steady, 1.31, 32, 8), RequestRecord(0.0, 1.0, meanwhile, 2.3, 32, 8)]
    then = RequestRecord(1.31, 0.84, steady, 1.15, 32, 8)
    spec = WorkloadSpec(m=2, num_requests=3, input_len=8, output_len=32)
    found = steady_decoding(WorkloadResult(spec, 3.0, (*first, then), (), None, 0))
    assert found == pytest.approx(2 / 0.01, rel=0.3), "the second that one of them waited does not count"


def test_nothing_is_said_where_requests_hardly_ever_decode_at_once():
    one_after_another = [RequestRecord(start, 0.1, (0.01,) * 63, 0.73, 64, 8) for start in (0.0, 1.0)]
    spec = WorkloadSpec(m=2, num_requests=2, input_len=8, output_len=64)
    assert steady_decoding(WorkloadResult(spec, 2.0, tuple(one_after_another), (), None, 0)) is None
    assert steady_decoding(load_result(8, 100.0)) is None


def measured(step: float) -> tuple[MeasuredM, ...]:
    """Both sides read prompts alike; a decode step takes 10 ms on the baseline."""
    found = []
    for m in LOAD.ms:
        one = MeasuredM(m)
        for index in range(LOOKS[0]):
            wobble = 1 + 0.004 * (index % 3 - 1)
            ours, theirs = long_prompts(m, step * wobble), long_prompts(m, 0.01)
            one.blocks.append(Block([answered(ours)], [answered(theirs)]))
        found.append(one)
    return tuple(found)


def checks(step: float, load: WorkloadSettings):
    evidence = sample_evidence({1: 1.0}, measured=measured(step), diagnoses={8: "blame 8"})
    return {check.name: check for check in judge(evidence, load, Bounds()).checks}


def test_a_slow_decode_step_fails_though_whole_requests_keep_up():
    slow = checks(0.014, LOAD)
    assert slow["throughput"].figures["ratio_m8"] > 0.95
    assert slow["throughput"].status == slow["latency"].status == "pass", "nothing else sees it"
    assert slow[NAME].status == "fail"
    assert "at M=8 a decode step takes 14.0" in slow[NAME].reason and "blame 8" in slow[NAME].reason
    assert checks(0.0101, LOAD)[NAME].status == "pass"
    assert NAME not in checks(0.014, replace(LOAD, decoding_apart=False))


def simulated(step_of: float):
    noise = itertools.cycle([0.99, 1.0, 1.01])

    def run(endpoint, spec):
        return long_prompts(spec.m, (step_of if endpoint == ARTIFACT else 0.01) * next(noise))

    return run


def decided(run, load: WorkloadSettings):
    servers = Servers(ARTIFACT, BASELINE, load, list(range(9000)), Repeats(run, ARTIFACT, BASELINE, None))
    return measure(servers, Bounds(), StageClock(shown=False))


def test_measuring_goes_on_until_decoding_is_decided_too():
    found, _ = decided(simulated(0.01 / 0.935), replace(LOAD, max_blocks=15))
    assert max(len(one.blocks) for one in found) > LOOKS[0]
    alone, _ = decided(simulated(0.01 / 0.935), replace(LOAD, max_blocks=15, decoding_apart=False))
    assert {len(one.blocks) for one in alone} == {LOOKS[0]}
    assert {decision.status for decision in decided(simulated(0.02), LOAD)[1]} == {"fail"}


def test_no_block_is_waited_for_that_could_not_tell():
    def run(endpoint, spec):
        return load_result(spec.m, 100.0 * spec.m)

    found, decisions = decided(run, LOAD)
    assert {len(one.blocks) for one in found} == {LOOKS[0]}
    assert [decision.status for decision in decisions] == ["inconclusive"] * 2
    evidence = sample_evidence({1: 1.0}, measured=tuple(found))
    check = next(one for one in judge(evidence, LOAD, Bounds()).checks if one.name == NAME)
    assert check.status == "inconclusive" and "all M requests hardly ever decoded at once" in check.reason


def test_a_wrong_fail_is_no_likelier_for_there_being_two_figures():
    one, two = (
        binding_decisions_of(measured(0.01), replace(LOAD, decoding_apart=apart), 0.93)
        for apart in (False, True)
    )
    assert two[0].high > one[0].high


def test_a_verdict_from_before_can_be_read_and_is_weaker_than_the_policy():
    load = replace(LOAD, ms=(1, 8, 32), decoding_apart=False)
    before = sample_verdict({1: 1.0, 8: 1.0, 32: 1.0}, workload=load)
    assert contradictions(before) == []
    assert "decoding after 4096 prompt tokens is not judged by itself" in weaker(before)
    assert not any(
        "by itself" in line for line in weaker(replace(before, workload=replace(load, decoding_apart=True)))
    )
