"""A machine that emulates a format judges everything but speed, and says where speed can be judged."""

from collections import Counter
from dataclasses import replace

import pytest
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.adapters.prometheus_text import parse_metrics
from scalegate.serving_check.adapters.series import VLLM_SERIES
from scalegate.serving_check.engine.request import EngineCapacity
from scalegate.serving_check.evidence.emulation import EmulatedProducts, emulated_products
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.interleaving import Servers, measure
from scalegate.serving_check.gate.record import contradictions, judged_again
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.gate.unjudged import OF_SPEED
from scalegate.serving_check.server.metrics import Metrics
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS

from ..gate_samples import ARTIFACT, BASELINE, EMULATED, sample_evidence, sample_verdict, simulated_run
from .test_recorded import recorded

SLOW = {1: 0.4, 32: 0.4}


def emulated_by(side: str) -> tuple[EmulatedProducts, ...]:
    return (replace(EMULATED[0], side=side),)


def verdict_on(given: dict, emulated: tuple[EmulatedProducts, ...]) -> Verdict:
    verdict = Verdict.from_json(sample_verdict({1: 1.0}).to_json() | given)
    return judged_again(replace(verdict, evidence=replace(verdict.evidence, emulated=emulated)))


@pytest.mark.parametrize(
    ("side", "names"),
    [("artifact", OF_SPEED), ("baseline", (*OF_SPEED, "plausible speed")), ("rival", ("rival",))],
)
def test_a_recorded_run_that_was_emulated_is_judged_on_all_but_speed(side: str, names: tuple[str, ...]):
    real, emulated = verdict_on(recorded(), ()), verdict_on(recorded(), emulated_by(side))
    changed = []
    for before, after in zip(real.checks, emulated.checks, strict=True):
        if after.name in names:
            changed.append(after)
            assert after.status == "unknown"
            assert f"not judged: 28 products of the {side} emulate FP8 inputs" in after.reason
            assert (after.figures, after.bound) == (before.figures, before.bound)
        else:
            assert after == before
    assert changed and {check.status for check in real.checks if check.name in names} - {"unknown"}
    assert real.speed_not_judged is None and "28 products" in emulated.speed_not_judged
    assert "compute capability 8.9" in emulated.speed_not_judged
    assert "`--engine vllm`" in emulated.speed_not_judged
    results = {point.status for point in emulated.curve}
    assert results == ({point.status for point in real.curve} if side == "rival" else {"unknown"})
    assert all(point.rival is None or point.rival.status is None for point in emulated.curve)


def test_an_emulation_passes_however_slow_it_is_and_the_same_speed_in_earnest_fails():
    verdict = sample_verdict(SLOW, evidence=sample_evidence(SLOW, emulated=EMULATED))
    assert (verdict.status, verdict.exit_status) == ("pass", 0)
    assert sample_verdict(SLOW).status == "fail"


@pytest.mark.parametrize(
    ("fault", "name"),
    [({"compiled": ({}, {"a kernel": 1})}, "compilations in traffic"), ({"canary": ()}, "canary text")],
)
def test_what_is_not_speed_fails_an_emulation_too(fault: dict, name: str):
    verdict = sample_verdict(SLOW, evidence=sample_evidence(SLOW, emulated=EMULATED, **fault))
    assert verdict.status == "fail"
    assert [check.name for check in verdict.failures] == [name]


def test_a_verdict_that_hides_the_emulation_contradicts_itself():
    verdict = sample_verdict(SLOW, evidence=sample_evidence(SLOW, emulated=EMULATED))
    assert contradictions(verdict) == []
    hidden = replace(verdict, speed_not_judged=None)
    assert contradictions(hidden) == ["it and its servers contradict each other on whether speed was judged"]


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1.0])
def test_an_emulation_gets_its_first_look_at_every_m_and_no_more(ratio: float):
    load = WorkloadSettings((1, 2, 4))
    sent: Counter[int] = Counter()
    run = simulated_run(lambda m: ratio)

    def counting(endpoint, spec):
        sent[spec.m] += spec.output_len == load.output_len
        return run(endpoint, spec)

    servers = Servers(ARTIFACT, BASELINE, load, list(range(500)), Repeats(counting, ARTIFACT, BASELINE, None))
    measured, decisions = measure(servers, Bounds(), StageClock(shown=False), is_judged=False)
    assert ([len(level.blocks) for level in measured], decisions) == ([LOOKS[0]] * 3, [])
    assert sent == dict.fromkeys(load.ms, 2 * LOOKS[0])


def test_our_server_tells_what_it_emulates_and_others_do_not():
    metrics = Metrics()
    kinds = {("FP8", EMULATED[0].hardware): 28}
    metrics.capacity = EngineCapacity(8, 100, 16, emulated_inputs=kinds)
    samples = parse_metrics(metrics.text().decode())
    assert emulated_products("artifact", samples) == EMULATED
    assert emulated_products("artifact", samples, VLLM_SERIES) == ()
    metrics.capacity = EngineCapacity(8, 100, 16)
    assert emulated_products("artifact", parse_metrics(metrics.text().decode())) == ()
