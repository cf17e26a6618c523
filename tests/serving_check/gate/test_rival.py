"""The rival check on simulated servers: NVFP4 beside IQ2_XXS, and the two exchanged."""

from collections import Counter
from collections.abc import Callable, Sequence

from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.evidence.curve import curve_of
from scalegate.serving_check.evidence.measurement import MeasuredM
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.gate.interleaving import Rival, Servers, measure
from scalegate.serving_check.gate.judge import judge
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings

from ..gate_samples import ARTIFACT, BASELINE, RIVAL, sample_evidence, simulated_run

LOAD = WorkloadSettings((1, 4, 8, 32))
TEXT = list(range(500))
FROM_M = int(Bounds.max_first_rival_m)


def nvfp4(m: int) -> float:
    """Of the unquantized baseline's throughput."""
    return 2.0 if m < 32 else 1.3


def iq2_xxs(m: int) -> float:
    """It reads fewer bytes, and spends the more time on unpacking the more requests there are."""
    return 2.4 if m == 1 else 1.2


def measured_of(
    artifact: Callable[[int], float], rival: Callable[[int], float], noise: float = 0.03
) -> list[MeasuredM]:
    run = simulated_run(artifact, noise, rival=rival)
    repeats = Repeats(run, ARTIFACT, BASELINE, None)
    servers = Servers(ARTIFACT, BASELINE, LOAD, TEXT, repeats, Rival(RIVAL, FROM_M))
    return measure(servers, Bounds(), StageClock(shown=False))[0]


def rival_check(measured: Sequence[MeasuredM]) -> CheckResult:
    evidence = sample_evidence({4: 1.0}, measured=tuple(measured), has_rival=True)
    checks = {check.name: check for check in judge(evidence, LOAD, Bounds()).checks}
    return checks["rival"]


def test_an_artifact_that_is_faster_from_m_4_on_passes_whatever_m_1_shows():
    measured = measured_of(nvfp4, iq2_xxs)
    check = rival_check(measured)
    assert check.status == "pass"
    assert "not counted: M=1 (0.8" in check.reason
    points = {point.m: point.rival for point in curve_of(measured, LOAD, Bounds())}
    assert [m for m, point in points.items() if point.status is None] == [1]
    assert points[1].ratio < 1 < points[4].ratio_low


def test_exchanged_it_fails_and_names_every_m():
    check = rival_check(measured_of(iq2_xxs, nvfp4))
    assert check.status == "fail"
    assert all(f"at M={m}:" in check.reason for m in (4, 8, 32)) and "at M=1:" not in check.reason


def test_blocks_go_on_where_only_the_rival_is_undecided():
    close = measured_of(nvfp4, lambda m: 2.0 / 1.01, noise=0.05)
    clear = measured_of(nvfp4, iq2_xxs, noise=0.05)
    blocks = [{level.m: len(level.blocks) for level in measured} for measured in (close, clear)]
    assert blocks[0][8] > blocks[1][8]
    assert blocks[0][1] == blocks[1][1], "M=1 has no vote"


def test_the_three_sides_take_turns_at_every_place_and_get_the_same_prompts():
    sent = []
    run = simulated_run(nvfp4, rival=iq2_xxs)

    def recording(endpoint, spec):
        sent.append((endpoint.model, spec.m, spec.seed))
        return run(endpoint, spec)

    servers = Servers(
        ARTIFACT, BASELINE, LOAD, TEXT, Repeats(recording, ARTIFACT, BASELINE, None), Rival(RIVAL, 4)
    )
    level = MeasuredM(8)
    assert servers.run_block(level) and servers.run_block(level)
    assert [model for model, _, _ in sent] == [
        "artifact",
        "baseline",
        "rival",
        "baseline",
        "rival",
        "artifact",
    ]
    assert set(Counter((m, seed) for _, m, seed in sent).values()) == {3}


def test_without_an_m_that_votes_nothing_is_proved():
    measured = [level for level in measured_of(nvfp4, iq2_xxs) if level.m == 1]
    check = rival_check(measured)
    assert check.status == "inconclusive" and "no M of at least 4" in check.reason
