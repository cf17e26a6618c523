"""Ms drawn between the given ones: in every gap, so close that none hides a bucket, the same for a seed."""

from itertools import pairwise

import pytest
from scalegate.serving_check.settings import MS, SHORTER, WorkloadSettings
from scalegate.serving_check.statistics.ms_between import STEP, draw_between

SEEDS = range(40)


@pytest.mark.parametrize(
    "ms", [MS, (1, 8, 32), (1, 32), (1, 3), (5, 7, 100), (32, 33, 64), (1, 8, 32, 64, 128)]
)
def test_every_gap_has_one_and_no_step_is_larger_than_the_policy_allows(ms: tuple[int, ...]):
    for seed in SEEDS:
        drawn = draw_between(ms, seed)
        together = sorted({*ms, *drawn})
        assert len(together) == len(ms) + len(drawn), "none is drawn twice, and none that is given"
        assert all(any(low < m < high for m in drawn) for low, high in pairwise(ms) if high - low > 1)
        assert all(after <= STEP * before for before, after in pairwise(together) if before >= ms[0])


@pytest.mark.parametrize("ms", [(1,), (1, 2), (7, 8, 9)])
def test_where_there_is_no_gap_none_is_drawn(ms: tuple[int, ...]):
    assert draw_between(ms, 0) == ()


def test_a_seed_draws_the_same_and_others_draw_everything_between():
    assert draw_between(MS, 7) == draw_between(MS, 7)
    assert {m for seed in range(400) for m in draw_between(MS, seed)} == set(range(1, 33)) - set(MS)


def test_a_recorded_seed_draws_these_on_any_machine():
    """Verdicts that are published record the seed alone."""
    assert [draw_between(MS, seed) for seed in range(3)] == [(3, 5, 13, 30), (3, 6, 9, 24), (3, 7, 14, 26)]


def test_a_drawn_m_is_sent_shorter_requests_of_the_same_mixture():
    load = WorkloadSettings((1, 4), 128, 64, seed=1, draws_between=True)
    assert load.ms_between == (2, 3) and load.measured_ms == (1, 2, 3, 4)
    assert load.at(4) is load
    assert (load.at(3).input_len, load.at(3).output_len) == (128 // SHORTER, 64 // SHORTER)
    for lengths, shorter in (((100, 20), (80, 16)), ((1, 2), (1, 2)), ((3, 640), (1, 160))):
        request = WorkloadSettings((1, 4), *lengths, draws_between=True).at(3)
        assert (request.input_len, request.output_len) == shorter
    assert WorkloadSettings((1, 4)).measured_ms == (1, 4)
