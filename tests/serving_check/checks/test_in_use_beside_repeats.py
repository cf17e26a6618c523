"""What a load as in use adds to checks of repeats: stalls, failed requests, and that it must be sent."""

from dataclasses import replace

from scalegate.serving_check.checks.failures import check_failures
from scalegate.serving_check.checks.stalls import check_stalls, m_in_doubt
from scalegate.serving_check.evidence.gaps import Gap
from scalegate.serving_check.evidence.in_use import BlockInUse
from scalegate.serving_check.gate.policy import weaker
from scalegate.serving_check.settings import Bounds

from ..gate_samples import IN_USE, measured_m, sample_verdict

BOUNDS = Bounds()
MEASURED = [measured_m(1, 1.0), measured_m(32, 1.0)]
SIDE = IN_USE.blocks[0].artifact
assert SIDE is not None
PAUSED = replace(SIDE, gaps=(Gap(1.0, 0.4), Gap(3.0, 0.4)))


def blocks(ours, theirs) -> list[BlockInUse]:
    return [BlockInUse(60, ours, theirs) for _ in range(4)]


def test_pauses_in_use_fail_where_the_baseline_has_none():
    result = check_stalls(MEASURED, BOUNDS, in_use=blocks(PAUSED, SIDE))
    assert result.status == "fail" and result.figures["stalled_repeats"] == 8
    assert "(in use)" in result.reason


def test_pauses_in_use_of_both_servers_are_the_machines():
    assert check_stalls(MEASURED, BOUNDS, in_use=blocks(PAUSED, PAUSED)).status == "pass"


def test_one_pause_in_use_leaves_doubt_and_the_largest_m_is_watched():
    once = replace(SIDE, gaps=(Gap(1.0, 0.4),))
    doubtful = [BlockInUse(60, once, SIDE), *blocks(SIDE, SIDE)]
    assert check_stalls(MEASURED, BOUNDS, in_use=doubtful).status == "pass"
    assert m_in_doubt(MEASURED, BOUNDS, doubtful) == 32
    assert m_in_doubt(MEASURED, BOUNDS, blocks(SIDE, SIDE)) is None


def test_a_request_that_fails_in_use_fails():
    result = check_failures(MEASURED, blocks(replace(SIDE, errors=("HTTP 500: lost",)), SIDE))
    assert result.status == "fail" and "in use: HTTP 500: lost (4×)" in result.reason
    assert check_failures(MEASURED, blocks(SIDE, replace(SIDE, errors=("late",)))).status == "inconclusive"


def test_a_verdict_with_no_load_as_in_use_is_weaker_than_the_policy():
    verdict = sample_verdict({1: 1.0, 8: 1.0, 32: 1.0})
    without = replace(verdict, evidence=replace(verdict.evidence, in_use=None))
    assert "no load as in use was sent" in weaker(without)
    assert "no load as in use was sent" not in weaker(verdict)
