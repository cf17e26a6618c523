"""How many requests of a profile there is time for, by what a trial block took."""

import pytest
from scalegate.serving_check.gate.profile_load import (
    LEAST_SHARE,
    MOST_OF_PROFILE,
    PROFILE_BLOCKS,
    share_of_requests,
)

ELAPSED = 120.0
SENT = 2 * PROFILE_BLOCKS
"""Blocks, on both sides."""


@pytest.mark.parametrize("trial_s", [0.5, 5.0, 10.0, 20.0, 30.0])
def test_a_profile_takes_half_of_the_time_before_it_at_most(trial_s: float) -> None:
    share = share_of_requests(trial_s, ELAPSED)
    assert trial_s * (1 + SENT * share) <= MOST_OF_PROFILE * ELAPSED * (1 + 1e-9)
    # No fewer requests are sent than there is time for.
    assert share == 1.0 or trial_s * (1 + SENT * share) == pytest.approx(MOST_OF_PROFILE * ELAPSED)
    assert (share == 1.0) == (trial_s < 7)


def test_some_requests_are_sent_on_the_slowest_machine() -> None:
    assert share_of_requests(100.0, ELAPSED) == LEAST_SHARE
