"""Requests of one kind, or with long prompts, that are slow although most are not."""

import math
from dataclasses import replace

import pytest
from scalegate.serving_check.checks.in_use.speed import check_speed_in_use
from scalegate.serving_check.checks.in_use.speed_by_group import ERROR, lower_rank
from scalegate.serving_check.evidence.in_use import BlockInUse, SideInUse
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.settings import Bounds

KINDS = ("greedy",) * 10 + ("sampled",) * 6 + ("sampled chat", "chat", "stop", "logprobs")
PROMPTS = (16, 32, 60, 100, 200, 400, 500, 600, 700, 900) * 2
SIDE = SideInUse(0.0, 4.0, 4000, (0.05,) * 20, (0.01,) * 20, {}, itl_p99=0.03)
QUICK = SIDE.ttfts


def judged(ttfts: tuple[float, ...] = QUICK, tpots: tuple[float, ...] = SIDE.tpots) -> CheckResult:
    ours = replace(SIDE, ttfts=ttfts, tpots=tpots)
    return check_speed_in_use([BlockInUse(20, ours, SIDE, KINDS, PROMPTS)] * 3, Bounds())


def late(*kinds: str) -> tuple[float, ...]:
    return tuple(0.5 if kind in kinds else 0.05 for kind in KINDS)


def test_no_group_of_a_sound_server_is_slow():
    assert judged().status == "pass"


def test_late_chats_are_named_and_nothing_else():
    result = judged(late("chat", "sampled chat"))
    assert result.status == "fail"
    assert result.reason == "the first token of chats takes 7.43\u00d7 the baseline's time"


def test_late_first_tokens_after_long_prompts_are_named_by_the_shortest_of_them():
    most_late = judged(tuple(0.5 if tokens > 128 else 0.05 for tokens in PROMPTS))
    assert most_late.reason.startswith("a request's first token takes"), "six of ten are"
    result = judged(tuple(0.5 if tokens > 500 else 0.05 for tokens in PROMPTS))
    assert result.reason.startswith("the first token of requests with prompts of more than 512 tokens takes")


def test_slow_streams_of_sampled_requests_are_named():
    result = judged(tpots=tuple(0.02 if "sampled" in kind else 0.01 for kind in KINDS))
    assert "the TPOT of sampled requests is 2.00\u00d7 the baseline's" in result.reason


def test_a_kind_of_few_requests_says_nothing():
    assert judged(late("stop")).status == "pass", "three of them: late by chance in 1 of 8 sound runs"


def test_blocks_of_earlier_verdicts_have_no_groups():
    ours = replace(SIDE, ttfts=late("chat"))
    assert check_speed_in_use([BlockInUse(20, ours, SIDE)] * 3, Bounds()).status == "pass"


@pytest.mark.parametrize("count", range(1, 60))
def test_the_lower_limit_of_a_median_has_its_level(count: int):
    def chance(rank: int) -> float:
        return math.fsum(math.comb(count, below) for below in range(rank + 1)) / 2**count

    rank = lower_rank(count)
    assert chance(0) > ERROR if rank is None else chance(rank) <= ERROR < chance(rank + 1)
