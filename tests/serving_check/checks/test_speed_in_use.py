"""Speed under a load as in use: what is slow at some Ms only, beside prompts only, or everywhere."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from scalegate.serving_check.checks.in_use.speed import LEAST_GAPS, Scatter, check_speed_in_use, in_words
from scalegate.serving_check.evidence.in_use import BlockInUse, SideInUse
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.settings import Bounds

MS = range(1, 35)
BOUNDS = Bounds()


def side(duration: float = 4.0, slow: Mapping[int, float] | None = None, **changes: object) -> SideInUse:
    """Chunks come every 10 ms at each M, times what `slow` says."""
    itls = {m: (2 * LEAST_GAPS, 0.01 * (slow or {}).get(m, 1.0)) for m in MS}
    sound = SideInUse(0.0, duration, 4000, (0.05,) * 60, (0.01,) * 60, itls, itl_p99=0.03)
    return replace(sound, **changes)


def judged(*artifact: SideInUse) -> CheckResult:
    durations = 4.0, 4.1, 3.95
    blocks = [
        BlockInUse(60, ours, side(duration)) for ours, duration in zip(artifact, durations, strict=True)
    ]
    return check_speed_in_use(blocks, BOUNDS)


def three(**changes: object) -> list[SideInUse]:
    return [side(duration, **changes) for duration in (4.05, 4.0, 4.0)]


def test_as_fast_as_the_baseline_passes():
    result = judged(*three())
    assert result.status == "pass" and "34 values of M up to 34" in result.reason


def test_slow_at_every_m_that_is_no_power_of_two_is_named():
    slow = {m: 2.0 for m in MS if m & (m - 1)}
    result = judged(*three(slow=slow))
    assert result.status == "fail"
    assert "at M=3, 5–7, 9–15, 17–31, 33–34 a token takes 2.00× the baseline's time" in result.reason
    assert "at the other 6 Ms it does not" in result.reason


def test_one_slow_m_may_be_somebody_elses_work():
    assert judged(*three(slow={13: 4.0})).status == "pass"


def test_ms_that_are_slow_in_one_block_alone_are_somebody_elses_work():
    slow = dict.fromkeys(range(10, 20), 8.0)
    assert judged(side(4.05, slow), side(4.0), side(4.0)).status == "pass"
    assert judged(side(4.05, slow), side(4.0, slow), side(4.0, slow)).status == "fail"


def test_ms_that_scatter_say_less():
    """At ten Ms the ratio is 1.9 on average, and above the bound in two blocks of three."""
    uneven = [{m: factor * (1.8 if m < 11 else 0.95) for m in MS} for factor in (0.5, 1.0, 1.9)]
    even = [{m: factor * (1.8 if m < 11 else 0.95) for m in MS} for factor in (0.98, 1.0, 1.02)]
    assert judged(*(side(4.0, slow) for slow in uneven)).status == "pass"
    assert judged(*(side(4.0, slow) for slow in even)).status == "fail"


@pytest.mark.parametrize("figure", ["tpots", "ttfts"])
def test_a_latency_that_blocks_do_not_agree_on_is_not_surely_beyond_its_bound(figure: str):
    def judged_at(*factors: float) -> CheckResult:
        usual = getattr(side(), figure)
        return judged(*(side(**{figure: tuple(value * factor for value in usual)}) for factor in factors))

    assert judged_at(3.5, 3.6, 3.7).status == "fail"
    assert judged_at(1.0, 3.6, 7.0).status == "pass"


def test_ms_with_few_gaps_say_nothing():
    few = dict.fromkeys(MS, (LEAST_GAPS // 4, 1.0))
    assert judged(*three(itls_by_m=few)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"duration": 8.0}, "output throughput is 0.50×"),
        ({"tpots": (0.02,) * 60}, "a request's TPOT is 2.00×"),
        ({"ttfts": (0.3,) * 60}, "a request's first token takes"),
        ({"itl_p99": 0.2}, "99th percentile of the time between tokens"),
    ],
)
def test_each_figure_fails_beyond_its_bound(changes: dict[str, object], words: str):
    result = judged(*(replace(block, **changes) for block in three()))
    assert result.status == "fail" and words in result.reason


def test_requests_that_failed_are_left_out_of_the_comparison():
    gaps = three(ttfts=(None,) * 30 + (0.05,) * 30, tpots=(None,) * 30 + (0.01,) * 30)
    assert judged(*gaps).status == "pass"


def test_no_block_is_inconclusive_and_one_has_no_limit():
    assert check_speed_in_use([], BOUNDS).status == "inconclusive"
    assert check_speed_in_use([BlockInUse(60, None, side())], BOUNDS).status == "inconclusive"
    single = check_speed_in_use([BlockInUse(60, side(5.0), side(4.0))], BOUNDS)
    assert single.status == "pass" and single.figures["throughput_ratio_high"] is None
    assert math.isclose(float(single.figures["throughput_ratio"] or 0), 0.8)


def test_the_curves_scatter_decides_where_three_blocks_alone_do_not():
    slow = [side(duration) for duration in (4.9, 5.6, 5.2)]
    blocks = [BlockInUse(60, ours, side(4.0)) for ours in slow]
    assert check_speed_in_use(blocks, BOUNDS).status == "pass"
    steady, shaky = (0.02, -0.02, 0.05, 0.0, -0.04, 0.03), (0.3, -0.3, 0.4, 0.0, -0.4, 0.2)
    assert check_speed_in_use(blocks, BOUNDS, Scatter(steady)).status == "fail"
    assert check_speed_in_use(blocks, BOUNDS, Scatter(shaky)).status == "pass"
    assert check_speed_in_use(blocks, BOUNDS, Scatter(steady[:2])).status == "pass", "two say nothing"
    assert check_speed_in_use(blocks, BOUNDS, Scatter(steady, correlation=0.9)).status == "pass"


def test_neighbours_are_written_together():
    assert in_words([1, 2, 4, 6, 7, 8]) == "1–2, 4, 6–8"
