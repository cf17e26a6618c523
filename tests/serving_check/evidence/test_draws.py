"""Figures of sampled tokens against distributions that are known."""

import math

import pytest
import torch
from scalegate.serving_check.draws import ROWS, draws_of
from scalegate.serving_check.evidence.in_use import PIT_BINS

HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
"""In nats: ln 2 times 1, 2, 3 and 3; the entropy is 1.75 ln 2, the variance 0.6875 ln² 2."""
LN2 = math.log(2)


def test_sums_are_over_the_tokens_and_constants_change_nothing():
    draws = draws_of(HALVES.expand(3, -1) + 7, [0, 1, 3], 1.0, "name")
    assert draws.tokens == 3
    assert draws.nats == pytest.approx(6 * LN2)
    assert draws.surprisal == pytest.approx((6 - 3 * 1.75) * LN2)
    assert draws.variance == pytest.approx(3 * 0.6875 * LN2**2)


def test_the_same_tokens_are_scored_at_twice_the_temperature():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    draws = draws_of(logits, [0, 1, 2, 3, 4], 0.4, "name")
    assert draws.hotter_nats == pytest.approx(draws_of(logits, [0, 1, 2, 3, 4], 0.8, "name").nats)


def test_logits_are_divided_by_the_temperature():
    halved = draws_of(HALVES[None] * 0.5, [1], 0.5, "name")
    assert halved.nats == pytest.approx(2 * LN2)
    assert halved == draws_of(HALVES[None], [1], 1.0, "name")


@pytest.mark.parametrize(("token", "low", "high"), [(0, 0, 10), (1, 10, 15), (2, 15, 17.5), (3, 17.5, 20)])
def test_a_token_lies_within_its_share_of_the_distribution(token: int, low: float, high: float):
    count = 4000
    bins = draws_of(HALVES.expand(count, -1), [token] * count, 1.0, "name").bins
    assert sum(bins) == count and len(bins) == PIT_BINS
    inside = [index for index, hits in enumerate(bins) if hits]
    assert inside == list(range(math.floor(low), math.ceil(high)))
    # Evenly spread there: 4.5 standard deviations of a binomial count.
    share = count / (high - low)
    whole = [hits for index, hits in enumerate(bins) if low <= index and index + 1 <= high]
    assert all(abs(hits - share) < 4.5 * math.sqrt(share) for hits in whole)


def test_random_shares_come_from_the_name():
    logits, tokens = HALVES.expand(200, -1), [0] * 200
    first = draws_of(logits, tokens, 1.0, "a")
    assert first == draws_of(logits, tokens, 1.0, "a")
    assert first.bins != draws_of(logits, tokens, 1.0, "b").bins


def test_parts_of_the_rows_add_up():
    count = 2 * ROWS + 3
    generator = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(count, 50, generator=generator), list(range(50)) * 3
    whole = draws_of(logits, tokens[:count], 0.8, "name")
    single = [draws_of(logits[row : row + 1], [tokens[row]], 0.8, "name") for row in range(count)]
    assert whole.tokens == count
    assert whole.surprisal == pytest.approx(sum(draw.surprisal for draw in single))
    assert whole.variance == pytest.approx(sum(draw.variance for draw in single))


def test_what_cannot_be_drawn_is_infinitely_unlikely_and_no_number_is_last():
    impossible = draws_of(torch.tensor([[0.0, 0.0, -math.inf]]), [2], 1.0, "name")
    assert impossible.nats == math.inf and impossible.bins[-1] == 1
    possible = draws_of(torch.tensor([[0.0, 0.0, -math.inf]]), [0], 1.0, "name")
    assert possible.nats == pytest.approx(LN2) and possible.variance == pytest.approx(0.0)
    broken = draws_of(torch.tensor([[math.nan, 0.0]]), [0], 1.0, "name")
    assert math.isnan(broken.nats) and broken.bins[-1] == 1
