"""Decoding and prompts are judged by themselves, by what they take of the time: one part hides the other."""

import math
import random
from dataclasses import replace

import pytest
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.checks.part_throughput import DECODING, PROMPTS
from scalegate.serving_check.evidence.curve import decisions_of, prompt_decisions_of, sequential_test
from scalegate.serving_check.evidence.measurement import Block, MeasuredM
from scalegate.serving_check.evidence.parts import parts_apart
from scalegate.serving_check.evidence.prefill_time import prefill_seconds
from scalegate.serving_check.evidence.steady_decoding import steady_decoding
from scalegate.serving_check.gate.interleaving import Servers, measure
from scalegate.serving_check.gate.judge import judge
from scalegate.serving_check.gate.policy import weaker
from scalegate.serving_check.gate.record import contradictions, judged_again
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS
from scalegate.serving_check.workload import RequestRecord, WorkloadResult, WorkloadSpec

from ..gate_samples import (
    ARTIFACT,
    BASELINE,
    answered,
    load_result,
    measured_m,
    sample_evidence,
    sample_verdict,
)

LOAD = WorkloadSettings((1, 8), input_len=4096)
READING, STEPS = 0.5, 64
"""Seconds to read a prompt, and output tokens of a request."""


def long_prompts(m: int, step: float, chunk: int = 1, reading: float = READING) -> WorkloadResult:
    """M prompts are read one after another, then all decode: `chunk` tokens every `step * chunk` seconds.

    While others are read, those before get a chunk with each.
    """
    requests = []
    for index in range(m):
        while_reading = [reading] * (m - 1 - index)
        decoding = [step * chunk] * ((STEPS - 1) // chunk - len(while_reading))
        first = reading * (index + 1)
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


def test_requests_that_hardly_all_decode_at_once_still_show_their_speed():
    """As with 900 tokens in and 64 out: the first of 32 answers ends soon after the last prompt."""
    m, step, mixed = 32, 0.01, 0.05
    requests = []
    for index in range(m):
        beside_prompts = min(STEPS - 1, 2 * (m - 1 - index))
        itls = (mixed,) * beside_prompts + (step,) * (STEPS - 1 - beside_prompts)
        first = 2 * mixed * (index + 1)
        requests.append(RequestRecord(0.0, first, itls, first + sum(itls), STEPS, 8))
    spec = WorkloadSpec(m=m, num_requests=m, input_len=8, output_len=STEPS)
    found = steady_decoding(WorkloadResult(spec, 4.0, tuple(requests), (), None, 0))
    assert found == pytest.approx(m / step, rel=0.02)


def test_nothing_is_said_where_requests_hardly_ever_decode_at_once():
    one_after_another = [RequestRecord(start, 0.1, (0.01,) * 63, 0.73, 64, 8) for start in (0.0, 1.0)]
    spec = WorkloadSpec(m=2, num_requests=2, input_len=8, output_len=64)
    assert steady_decoding(WorkloadResult(spec, 2.0, tuple(one_after_another), (), None, 0)) is None
    assert steady_decoding(load_result(8, 100.0)) is None


def read_at_once(spec: WorkloadSpec, step: float, reading: float) -> WorkloadResult:
    """All M prompts are read in `reading` seconds, then all decode."""
    itls = (step,) * (spec.output_len - 1)
    record = RequestRecord(0.0, reading, itls, reading + sum(itls), spec.output_len, spec.input_len)
    result = load_result(spec.m, spec.m * spec.output_len / record.e2el, output_len=spec.output_len)
    return replace(result, spec=spec, requests=(record,) * spec.m, duration=record.e2el)


@pytest.mark.parametrize(("speed", "status"), [(1.0, "pass"), (0.7, "fail")])
def test_blocks_that_only_prompts_need_have_short_answers(speed: float, status: str):
    load, generator = WorkloadSettings((1, 8)), random.Random(3)

    def run(endpoint, spec):
        reading = 0.5 * math.exp(generator.gauss(0, 0.15))
        ours = endpoint == ARTIFACT
        return read_at_once(spec, 0.003 if ours else 0.01, reading / speed if ours else reading)

    servers = Servers(ARTIFACT, BASELINE, load, list(range(500)), Repeats(run, ARTIFACT, BASELINE, None))
    found, decisions = measure(servers, Bounds(), StageClock(shown=False))
    assert {decision.status for decision in decisions} >= {status}
    level = max(found, key=lambda level: len(level.prompt_blocks))
    assert level.prompt_blocks and len(level.blocks) >= LOOKS[0]
    short = [repeat for block in level.prompt_blocks for repeat in block.repeats]
    assert {repeat.output_tokens for repeat in short} == {16 * level.m}
    assert {repeat.output_tokens for repeat in level.artifact} == {64 * level.m}
    assert decisions_of(found, load, 0.93)[found.index(level)].status == "pass", "whole requests keep up"
    prompts = prompt_decisions_of(found, load, 0.93)[level.m]
    assert prompts.status == status or prompts.status == "inconclusive"
    assert prompts.blocks > len(level.blocks)


def test_short_answers_in_a_verdict_are_as_short_as_they_should_be():
    def problems(output_len: int) -> list[str]:
        verdict = sample_verdict({1: 1.2, 8: 1.2})
        one, eight = verdict.evidence.measured
        short = measured_m(8, 1.2, blocks=3, output_len=output_len).blocks
        found = (one, replace(eight, prompt_blocks=short))
        return contradictions(
            judged_again(replace(verdict, evidence=replace(verdict.evidence, measured=found)))
        )

    assert not problems(16)
    assert any("M=8 do not match" in problem for problem in problems(64))


def measured(step: float, reading: float = READING, base: float = READING) -> tuple[MeasuredM, ...]:
    """A decode step takes 10 ms on the baseline, and a prompt `base` seconds."""
    found = []
    for m in LOAD.ms:
        level = MeasuredM(m)
        for index in range(LOOKS[0]):
            wobble = 1 + 0.004 * (index % 3 - 1)
            ours = long_prompts(m, step * wobble, reading=reading * wobble)
            theirs = long_prompts(m, 0.01, reading=base)
            level.blocks.append(Block([answered(ours)], [answered(theirs)]))
        found.append(level)
    return tuple(found)


def checks(step: float, reading: float = READING, base: float = READING, load: WorkloadSettings = LOAD):
    evidence = sample_evidence({1: 1.0}, measured=measured(step, reading, base), diagnoses={8: "blame 8"})
    return {check.name: check for check in judge(evidence, load, Bounds()).checks}


def test_a_slow_decode_step_fails_though_whole_requests_keep_up():
    slow = checks(0.014)
    assert slow["throughput"].figures["ratio_m8"] > 0.94
    assert slow["throughput"].status == "fail", "at M=1 most of the time is decoding's"
    assert slow[DECODING].status == "fail"
    assert "at M=8 a decode step takes 14.0" in slow[DECODING].reason and "blame 8" in slow[DECODING].reason
    assert checks(0.0095)[DECODING].status == "pass"


def test_a_slow_prefill_fails_though_fast_decoding_makes_up_for_it():
    slow = checks(0.005, reading=0.6)
    assert slow["throughput"].figures["ratio_m1"] > 1 and slow[DECODING].status == "pass"
    assert slow[PROMPTS].status == "fail"
    assert (
        "at M=1, where prompts take 44% of the baseline's time, 6,827 prompt tokens" in slow[PROMPTS].reason
    )
    assert "against the baseline's 8,192" in slow[PROMPTS].reason
    assert checks(0.005, reading=0.5)[PROMPTS].status == "pass", "the control"


def test_prompts_that_take_little_of_the_time_are_not_judged_by_themselves():
    """At M=8 they are: there it is over 30%."""
    found = checks(0.01, reading=0.3, base=0.2)
    assert set(found[PROMPTS].figures) == {"prompt_ratio_m8"}
    assert set(found[DECODING].figures) == {"decode_ratio_m1", "decode_ratio_m8"}
    assert PROMPTS not in checks(0.01, reading=0.03, base=0.02)
    long = checks(0.01, reading=20.0, base=20.0)
    assert set(long[PROMPTS].figures) == {"prompt_ratio_m1", "prompt_ratio_m8"}
    assert DECODING not in long, "decoding takes a twentieth and less"


def test_the_baseline_alone_says_what_is_judged_by_itself():
    for reading in (0.02, 0.5, 5.0):
        levels = measured(0.01, reading=reading, base=0.2)
        assert [parts_apart(level, LOAD).prompts for level in levels] == [False, True]


def simulated(step_of: float):
    noise = random.Random(1)

    def run(endpoint, spec):
        return long_prompts(spec.m, (step_of if endpoint == ARTIFACT else 0.01) * noise.gauss(1, 0.004))

    return run


def decided(run, load: WorkloadSettings):
    servers = Servers(ARTIFACT, BASELINE, load, list(range(9000)), Repeats(run, ARTIFACT, BASELINE, None))
    return measure(servers, Bounds(), StageClock(shown=False))


def test_measuring_goes_on_until_decoding_is_decided_too():
    found, _ = decided(simulated(0.01 / 0.935), replace(LOAD, max_blocks=15))
    assert max(len(level.blocks) for level in found) == 15
    alone, _ = decided(simulated(0.01 / 1.1), replace(LOAD, max_blocks=15))
    assert max(len(level.blocks) for level in alone) < 15, "the control"
    assert {decision.status for decision in decided(simulated(0.02), LOAD)[1]} == {"fail"}


def bursts(prompts: float):
    """Answers come in one chunk after this share of a request's time, so they show no decoding."""

    def run(endpoint, spec):
        seconds = 0.64
        return load_result(spec.m, 100.0 * spec.m, ttft=prompts * seconds)

    return run


def test_no_block_is_waited_for_that_could_not_tell():
    found, decisions = decided(bursts(0.5), LOAD)
    assert {len(level.blocks) for level in found} == {LOOKS[0]}
    assert [decision.status for decision in decisions] == ["inconclusive"] * 2
    evidence = sample_evidence({1: 1.0}, measured=tuple(found))
    check = next(check for check in judge(evidence, LOAD, Bounds()).checks if check.name == DECODING)
    assert check.status == "inconclusive" and "ever decoded at once" in check.reason


@pytest.mark.parametrize(
    ("prompts", "load"),
    [(0.2, LOAD), (0.5, replace(LOAD, output_len=8)), (0.95, LOAD)],
    ids=["prompts take little", "answers are short", "decoding takes little"],
)
def test_decoding_that_nobody_shows_is_left_to_whole_requests(prompts: float, load: WorkloadSettings):
    levels, decisions = decided(bursts(prompts), load)
    assert not any(parts_apart(level, load).decoding for level in levels)
    assert {decision.status for decision in decisions} == {"pass"}


def test_at_a_drawn_m_decoding_that_nobody_shows_is_left_to_whole_requests():
    drawing = replace(LOAD, draws_between=True)
    levels, _ = decided(bursts(0.5), drawing)
    given = [level.m in LOAD.ms for level in levels]
    assert [parts_apart(level, drawing).decoding for level in levels] == given
    assert [parts_apart(level, drawing).prompts for level in levels] == given


def test_a_wrong_fail_is_no_likelier_for_there_being_more_figures():
    """Both Ms have three here; without the shares of the time, as in verdicts from before, one."""
    levels = measured(0.01)
    assert sequential_test(levels, LOAD, 0.93).number_of_ms == 2 * 3
    before = without_shares(levels)
    assert sequential_test(before, LOAD, 0.93).number_of_ms == 2
    assert sequential_test(before, replace(LOAD, decoding_apart=True), 0.93).number_of_ms == 2 * 2
    three, single = (decisions_of(each, LOAD, 0.93) for each in (levels, before))
    assert three[0].high > single[0].high


def without_shares(levels: tuple[MeasuredM, ...]) -> list[MeasuredM]:
    return [
        replace(
            level,
            blocks=[
                replace(
                    block,
                    artifact=[replace(repeat, prefill_seconds=None) for repeat in block.artifact],
                    baseline=[replace(repeat, prefill_seconds=None) for repeat in block.baseline],
                )
                for block in level.blocks
            ],
        )
        for level in levels
    ]


def test_a_verdict_from_before_can_be_read_and_is_weaker_than_the_policy():
    sample = sample_verdict({1: 1.0, 8: 1.0, 32: 1.0})
    before = replace(
        sample, evidence=replace(sample.evidence, measured=tuple(without_shares(sample.evidence.measured)))
    )
    before = judged_again(before)
    assert contradictions(before) == [] and before.status == "pass"
    assert "the time that prompts take is not recorded, so no part is judged by itself" in weaker(before)
    assert not any("by itself" in line for line in weaker(sample))
    apart = judged_again(replace(before, workload=replace(before.workload, decoding_apart=True)))
    assert DECODING in [check.name for check in apart.checks], "as it was asked for"


def test_what_prompts_take_is_the_time_in_which_a_request_has_no_token_yet():
    overlapping = [RequestRecord(0.0, 1.0, (), 3.0, 64, 8), RequestRecord(0.5, 1.0, (), 3.0, 64, 8)]
    later = RequestRecord(2.5, 0.25, (), 1.0, 64, 8)
    failed = RequestRecord(0.0, None, (), 9.0, 0, 8, error="HTTP 500")
    spec = WorkloadSpec(m=2, num_requests=4, input_len=8, output_len=64)
    result = WorkloadResult(spec, 4.0, (*overlapping, later, failed), (), None, 0)
    assert prefill_seconds(result.requests) == pytest.approx(1.5 + 0.25)
    assert prefill_seconds((failed,)) is None
