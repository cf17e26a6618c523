"""A profile of loads: prompts and decoding are judged apart, and what is not known is said."""

from dataclasses import replace

import pytest
from scalegate.serving_check.checks.in_use.profile import check_profile, described
from scalegate.serving_check.evidence.in_use import BlockInUse, PartsInUse, ProfileFigures, SideInUse
from scalegate.serving_check.evidence.profile_ratios import LEAST_GAPS, profile_ratios
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.gate.record import contradictions, judged_again
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.workload.spec import RequestRecord

from ..gate_samples import CHAT, sample_verdict

PROMPTS = (20,) * 6 + (800,) * 6
NOISE = (1.0, 1.04, 0.97, 1.02)
"""Of each block: a standard deviation of 3%."""


def side(prompt_s: float = 1.0, itl: float = 0.01, long_ttft: float = 0.2, **changes) -> SideInUse:
    parts = PartsInUse(prompt_s, {4: (2 * LEAST_GAPS, itl), 8: (LEAST_GAPS, 2 * itl)})
    whole = SideInUse(0.0, 4.0, 600, (0.02,) * 6 + (long_ttft,) * 6, (0.01,) * 12, {}, parts=parts)
    return replace(whole, **changes)


def figures(*artifact: SideInUse) -> ProfileFigures:
    blocks = tuple(BlockInUse(12, ours, side()) for ours in artifact)
    return ProfileFigures("rag", 0.5, (PROMPTS,) * len(blocks), ((50,) * 12,) * len(blocks), blocks)


def judged(prompt_s: float = 1.0, itl: float = 0.01, **changes) -> CheckResult:
    sides = (side(prompt_s * noise, itl * noise, **changes) for noise in NOISE)
    return check_profile("rag", figures(*sides), Bounds())


def test_as_fast_as_the_baseline_passes_and_says_what_was_sent():
    result = judged()
    assert result.status == "pass"
    assert "48 requests with prompts of 20 to 800 tokens and answers of 50 to 50" in result.reason
    assert "RAGPulse" in result.reason and "0.5 times the trace's" in result.reason
    assert "times the trace's" not in described(replace(figures(side()), scale=1.0))


def test_slow_prompts_fail_though_decoding_is_fast_and_the_longer_ones_are_named():
    result = judged(prompt_s=2.0, itl=0.005, long_ttft=0.6)
    assert result.status == "fail"
    assert "prompts 0.50×" in result.measured and "decoding 1.9" in result.measured
    assert "those over 410 tokens wait 3.00× its time for the first token, the others 1.00×" in result.reason
    assert "tokens come at" not in result.reason


def test_slow_decoding_fails_though_prompts_are_fast():
    result = judged(prompt_s=0.5, itl=0.02)
    assert result.status == "fail" and "while no prompt is read, tokens come at 0.50×" in result.reason
    assert "prompts are read at" not in result.reason


def test_a_part_that_is_perhaps_too_slow_passes_with_its_limits():
    """0.91 at a floor of 0.93, in blocks that scatter by 3%."""
    result = judged(prompt_s=1 / 0.91)
    assert result.status == "pass" and "prompts 0.90× [0." in result.measured


def test_one_block_alone_decides_nothing():
    result = check_profile("rag", figures(side(prompt_s=9.0)), Bounds())
    assert result.status == "inconclusive" and "prompts 0.11×," in result.measured


def test_blocks_that_hide_a_part_half_as_fast_decide_nothing():
    """Noise that even a server as fast as the baseline cannot be told from a slow one in."""
    loud = (side(prompt_s=noise) for noise in (0.5, 2.0, 0.6, 1.7))
    result = check_profile("rag", figures(*loud), Bounds())
    assert result.status == "inconclusive" and "that prompts may be 2 times slower" in result.reason
    assert "decoding may" not in result.reason


def test_few_steady_tokens_leave_decoding_unknown():
    few = PartsInUse(1.0, {4: (LEAST_GAPS - 1, 9.0)})
    result = judged(parts=few)
    assert result.status == "pass" and "decoding not known" in result.measured


def test_decoding_is_compared_at_the_ms_that_both_had():
    """An artifact that has more requests at once is not slower for it."""
    busier = PartsInUse(1.0, {4: (LEAST_GAPS, 0.01), 8: (9 * LEAST_GAPS, 0.02), 16: (9 * LEAST_GAPS, 0.04)})
    assert profile_ratios(figures(side(parts=busier))).decoding.ratio == pytest.approx(1.0)


def test_nothing_sent_and_nothing_finished_are_inconclusive():
    assert check_profile("chat", None, Bounds()).status == "inconclusive"
    broken = replace(figures(side()), blocks=(BlockInUse(12, None, side()),))
    assert check_profile("rag", broken, Bounds()).status == "inconclusive"


def test_a_verdict_judges_the_profile_that_was_asked_for_and_no_other():
    asked = sample_verdict({1: 1.0, 8: 1.2}, workload=WorkloadSettings((1, 8), profile="chat"))
    not_sent = [check for check in asked.checks if check.name == "profile of loads"]
    assert [check.status for check in not_sent] == ["inconclusive"]
    in_use = replace(asked.evidence.in_use, profile=CHAT)
    sent = judged_again(replace(asked, evidence=replace(asked.evidence, in_use=in_use)))
    [check] = [check for check in sent.checks if check.name == "profile of loads"]
    assert check.status == "pass" and not contradictions(sent)
    other = replace(sent, workload=replace(sent.workload, profile="rag"))
    assert any("another profile of loads" in problem for problem in contradictions(judged_again(other)))
    none = judged_again(replace(sent, workload=replace(sent.workload, profile=None)))
    assert "profile of loads" not in {check.name for check in none.checks}


def test_a_request_of_the_profile_that_failed_is_a_failed_request():
    asked = sample_verdict({1: 1.0, 8: 1.2}, workload=WorkloadSettings((1, 8), profile="chat"))
    [block, *others] = CHAT.blocks
    failed = replace(block, artifact=replace(block.artifact, errors=("refused",)))
    in_use = replace(asked.evidence.in_use, profile=replace(CHAT, blocks=(failed, *others)))
    judged = judged_again(replace(asked, evidence=replace(asked.evidence, in_use=in_use)))
    assert "no failed requests" in {check.name for check in judged.failures}


def test_parts_are_of_times_with_and_without_a_prompt_that_is_read():
    def record(start: float, ttft: float, itls: tuple[float, ...]) -> RequestRecord:
        return RequestRecord(start, ttft, itls, ttft + sum(itls), 1 + len(itls), 8)

    # The second one's prompt is read from 2 to 3, while the first one gets a token.
    parts = PartsInUse.of([record(0.0, 1.0, (0.5, 0.5, 1.0, 0.5)), record(2.0, 1.0, (0.5,))])
    assert parts.prompt_seconds == 2.0
    assert parts.steady_itls_by_m == {1: (2, 0.5), 2: (2, 0.5)}
    assert PartsInUse.of([]) == PartsInUse(None, {})
