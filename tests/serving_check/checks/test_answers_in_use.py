"""The checks of answers under a load as in use, passing, failing and unknown, on figures of plain numbers."""

import math
from dataclasses import replace

import pytest
from scalegate.serving_check.checks.in_use.logprobs import (
    MOST,
    MOST_OF_ALTERNATIVES,
    MOST_ON_AVERAGE,
    check_logprobs,
)
from scalegate.serving_check.checks.in_use.sampling import FEWEST_DRAWN, check_sampling
from scalegate.serving_check.checks.in_use.text import check_text_in_use
from scalegate.serving_check.evidence.in_use import PIT_BINS, AnswerInUse, Draws
from scalegate.serving_check.settings import Bounds

BOUNDS = Bounds()
KINDS = ("greedy", "chat", "stop", "end", "logprobs")


def answer(kind: str = "greedy", off: int = 0, prompt_tokens: int = 30, m: float = 4.0, beside: int = 0):
    return AnswerInUse(kind, prompt_tokens, 40, m, beside, off, 10, "beginning")


SOUND = [
    answer(kind, prompt_tokens=2 ** (4 + index % 7), m=1 + (7 * index) % 33, beside=index % 3)
    for index, kind in enumerate(KINDS * 6)
]
"""Of every kind, context, M and company, in all combinations that 30 answers have."""


def text(answers: list[AnswerInUse]) -> tuple[str, str]:
    result = check_text_in_use(answers, BOUNDS)
    return result.status, result.reason


def wrong_where(holds) -> list[AnswerInUse]:
    return [replace(each, off=20, baseline_off=20) if holds(each) else each for each in SOUND]


def test_the_artifacts_own_text_passes_with_what_it_was_served_beside():
    status, reason = text(SOUND)
    assert status == "pass"
    assert "30 answers, with contexts of 56 to 1064 tokens, at an M of 1.0 to 33.0" in reason
    assert "20 of them while prompts were read" in reason
    assert text([replace(SOUND[0], off=2), *SOUND[1:]])[0] == "pass", "near ties"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"is_streamed": False}, "only answers that are not streamed are wrong"),
        ({"is_chat": True}, "only answers in a chat are wrong"),
    ],
)
def test_a_form_of_requests_of_all_kinds_may_be_wrong_alone(form: dict[str, bool], words: str):
    several = [replace(each, **form) if index % 4 == 1 else each for index, each in enumerate(SOUND)]
    wrong = [replace(each, off=20) if index % 4 == 1 else each for index, each in enumerate(several)]
    wrong = [replace(each, off=20) if each.kind == "chat" and "is_chat" in form else each for each in wrong]
    assert text(several)[0] == "pass"
    status, reason = text([replace(each, baseline_off=each.off) for each in wrong])
    assert status == "fail" and words in reason


def test_without_greedy_answers_nothing_is_known():
    assert text([])[0] == "inconclusive"
    assert text([answer("sampled", off=40)])[0] == "inconclusive", "sampled ones are judged elsewhere"


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        (lambda each: each.kind == "chat", "only answers in a chat are wrong"),
        (lambda each: each.prompts_beside > 0, "only answers beside which a prompt was read are wrong"),
        (lambda each: each.prompt_tokens > 100, "only answers beyond 104 tokens of context are wrong"),
        (lambda each: each.prompt_tokens < 100, "only answers of less than 168 tokens of context are wrong"),
        (lambda each: each.m > 16, "only answers decoded at an M above 16.0 are wrong"),
        (lambda each: each.m < 4, "only answers decoded at an M below 4.0 are wrong"),
        (lambda each: 8 < each.m < 17, "only answers decoded at an M of 9.0 to 16.0 are wrong"),
        (
            lambda each: each.kind == "chat" or each.prompt_tokens > 500,
            "only answers beyond 296 tokens of context or in a chat are wrong",
        ),
        (
            lambda each: each.prompts_beside == 2 and each.kind == "greedy",
            "only answers of plain completions are wrong",
        ),
        (lambda each: True, "another model is served"),
    ],
)
def test_the_reason_names_what_wrong_answers_have_in_common(holds, words: str):
    status, reason = text(wrong_where(holds))
    assert status == "fail" and words in reason


def test_a_cause_of_most_wrong_answers_is_named_beside_a_few_of_another():
    """Three of other kinds are wrong as well, and no condition tells them from right ones."""
    short = [each for each in SOUND if each.prompt_tokens == 32]
    wrong = [each for each in SOUND if each.prompt_tokens > 100 or each in short[:3]]
    mixed = [
        replace(each, m=4.0, prompts_beside=0, off=20 * (each in wrong), baseline_off=20 * (each in wrong))
        for each in SOUND
    ]
    status, reason = text(mixed)
    assert status == "fail" and "all but 3 of them are answers beyond 104 tokens of context" in reason


def test_one_wrong_answer_among_many_fails_and_few_wrong_tokens_in_all_do_too():
    assert text([replace(SOUND[0], off=6), *SOUND[1:]])[0] == "fail"
    thin = [replace(each, off=1, baseline_off=1) for each in SOUND]
    status, reason = text(thin)
    assert status == "fail" and "30 of 1200 tokens" in reason


def test_a_share_of_wrong_tokens_in_the_few_longest_contexts_fails_and_is_named():
    """5% of 200 tokens, which are half a percent of all."""
    many = [answer() for _ in range(45)]
    long = [replace(answer(prompt_tokens=4000), off=2, baseline_off=2) for _ in range(5)]
    status, reason = text(many + long)
    assert status == "fail" and "10 of 200 tokens of answers beyond 128 tokens of context" in reason
    near_ties = [replace(answer, off=1) for answer in long]
    assert text(many + near_ties)[0] == "pass"


def test_the_baselines_server_in_the_artifacts_place_is_named():
    status, reason = text([replace(each, off=2, baseline_off=0) for each in SOUND])
    assert status == "fail" and "serves the baseline" in reason


def test_a_few_wrong_tokens_in_each_answer_of_a_kind_are_named_by_it():
    """Too few in any one: 4 of 40."""
    few = [replace(answer("adjusted", off=4), prompt_tokens=200 * (index % 2)) for index in range(4)]
    status, reason = text([*SOUND * 4, *few])
    assert status == "fail" and "16 of 160 tokens of answers with penalties and a bias" in reason
    assert text([*SOUND * 4, *(replace(answer, off=1) for answer in few)])[0] == "pass"


# Sampling.


EVEN = Draws(1000, 2000.0, 10.0, 1500.0, (50,) * PIT_BINS)


def drawn(draws: Draws = EVEN, **changes: object) -> AnswerInUse:
    return replace(answer("sampled", off=400), draws=draws, **changes)


def sampling(*answers: AnswerInUse) -> tuple[str, str]:
    result = check_sampling(answers)
    return result.status, result.reason


def test_draws_that_fit_pass_and_none_are_unknown():
    assert sampling(drawn(), drawn())[0] == "pass"
    assert sampling(answer())[0] == "unknown"
    few = replace(EVEN, tokens=FEWEST_DRAWN - 1)
    assert sampling(drawn(few))[0] == "inconclusive"


def test_sums_decide_not_single_answers():
    """z of 2.6 each is 3.7 together."""
    surprising = replace(EVEN, surprisal=100.0)
    assert sampling(drawn(surprising))[0] == "pass"
    assert sampling(drawn(surprising), drawn(surprising))[0] == "fail"
    assert sampling(drawn(surprising), drawn(replace(EVEN, surprisal=-100.0)))[0] == "pass"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"surprisal": -150.0}, "as if the temperature were 10% lower"),
        ({"surprisal": 150.0}, "as if the temperature were 10% higher"),
        ({"surprisal": 3000.0}, "+3.00 nats beside the entropy"),
        ({"surprisal": math.inf}, "other logits than the artifact's"),
        ({"surprisal": math.nan}, "other logits than the artifact's"),
        ({"surprisal": -150.0, "bins": (*(53,) * 18, 46, 0)}, "top-k, top-p or min-p"),
        ({"surprisal": -10.0, "bins": (*(53,) * 18, 46, 0)}, "top-k, top-p or min-p"),
        ({"bins": (*(53,) * 18, 46, 0)}, "0 tokens instead of 50 are in part 20 of 20"),
        ({"bins": (100, 0, *(50,) * 18)}, "100 tokens instead of 50 are in part 1 of 20"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], words: str):
    status, reason = sampling(drawn(replace(EVEN, **changes)))
    assert status == "fail" and words in reason


def test_an_ignored_temperature_is_named():
    greedy = replace(EVEN, nats=300.0, surprisal=-900.0, bins=(300, 300, 300, 100, *(0,) * 16))
    status, reason = sampling(drawn(greedy, off=0))
    assert status == "fail" and "the temperature is ignored" in reason


def test_answers_that_do_not_change_with_the_seed_fail_unless_they_had_to_be_equal():
    beside = [drawn(repeats_other_seed=False), drawn(repeats_other_seed=True)]
    status, reason = sampling(*beside)
    assert status == "fail" and "1 of 2 answers equal an earlier one" in reason
    certain = replace(EVEN, nats=5.0)
    assert sampling(drawn(certain, repeats_other_seed=True))[0] == "pass"
    assert sampling(drawn(repeats_other_seed=False))[0] == "pass"


def test_only_the_choices_of_requests_for_several_may_be_wrong():
    few = replace(EVEN, tokens=100, surprisal=60.0, variance=75.0, bins=(5,) * PIT_BINS)
    choices = [drawn(few, choice=index) for index in range(3)]
    status, reason = sampling(drawn(), *choices)
    assert status == "fail" and "only the 3 answers to requests for several" in reason
    assert sampling(drawn(), *(replace(choice, choice=None) for choice in choices))[0] == "fail"
    assert (
        sampling(drawn(), *(replace(choice, draws=replace(few, surprisal=5.0)) for choice in choices))[0]
        == "pass"
    )
    everywhere = replace(EVEN, surprisal=3000.0)
    assert "beside the entropy" in sampling(drawn(everywhere), *choices)[1], "not of these alone"


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"is_streamed": False}, "only the 2 answers that are not streamed do not fit, with z"),
        ({"is_chat": True}, "only the 2 answers in chats do not fit, with z"),
        ({"choice": 1}, "only the 2 further answers to requests for several do not fit, with z"),
    ],
)
def test_a_group_of_sampled_answers_may_be_wrong_alone(group: dict[str, object], words: str):
    greedy = replace(EVEN, tokens=100, nats=30.0, surprisal=-120.0, variance=150.0, bins=(5,) * PIT_BINS)
    wrong = [drawn(greedy, off=0, **group), drawn(greedy, off=0, **group)]
    sound = [drawn(**group), drawn(), drawn(choice=0)]
    status, reason = sampling(*sound, *wrong)
    assert status == "pass", "beside sound ones of the group it is too few"
    status, reason = sampling(*sound[1:], *wrong)
    assert status == "fail" and words in reason
    assert ("the temperature is ignored" in reason) == ("choice" not in group)


def test_one_answer_may_be_wrong_although_all_together_fit():
    """Among three answers, one that is 1e4 times as likely at twice the temperature is not rare enough."""
    sound, other = [drawn(replace(EVEN, nats=300.0, hotter_nats=320.0))] * 2
    near, far = (replace(EVEN, nats=300.0, hotter_nats=300 - math.log(ratio)) for ratio in (1e4, 1e8))
    assert sampling(sound, other, drawn(near))[0] == "pass"
    status, reason = sampling(sound, other, drawn(far))
    assert status == "fail" and "1 of 3 answers, such as" in reason and "answers to another prompt" in reason
    assert sampling(sound, other, drawn(replace(far, hotter_nats=None)))[0] == "pass", "an older verdict"


def test_a_choice_that_is_told_again_is_named():
    again = [
        drawn(choice=0),
        drawn(choice=1, repeats_other_seed=True),
        drawn(choice=2, repeats_other_seed=True),
    ]
    status, reason = sampling(drawn(repeats_other_seed=False), *again)
    assert status == "fail" and "2 of 2 further choices of a request equal an earlier one" in reason


# Log-probabilities.


def test_log_probabilities_pass_within_rounding_and_are_unknown_if_not_told():
    close = replace(answer("logprobs"), logprob_errors=(MOST_ON_AVERAGE / 2, MOST / 2))
    assert check_logprobs([close, answer()]).status == "pass"
    assert check_logprobs([answer()]).status == "unknown"


@pytest.mark.parametrize("errors", [(2 * MOST_ON_AVERAGE, MOST), (0.0, 2 * MOST), (math.nan, math.nan)])
def test_log_probabilities_of_other_logits_fail(errors: tuple[float, float]):
    result = check_logprobs([replace(answer("logprobs"), logprob_errors=errors)])
    assert result.status == "fail" and "positions" in result.reason


def test_alternatives_are_judged_by_themselves():
    right = replace(answer("logprobs"), logprob_errors=(0.0, 0.0), alternatives_error=MOST_OF_ALTERNATIVES)
    assert check_logprobs([right]).status == "pass"
    result = check_logprobs([replace(right, alternatives_error=2 * MOST_OF_ALTERNATIVES)])
    assert result.status == "fail" and "those of the most likely ones are 0.60 nats off" in result.reason
    assert check_logprobs([replace(right, alternatives_error=math.nan)]).status == "fail"


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"is_chat": True}, "only chats: they are not those"),
        ({"is_streamed": False}, "only unstreamed completions: they are not those"),
    ],
)
def test_log_probabilities_are_judged_by_group(group: dict[str, object], words: str):
    """A tenth of all tokens: the mean of all is within the bound."""
    right = [replace(answer("logprobs"), logprob_errors=(0.0, 0.0)) for _ in range(9)]
    wrong = replace(right[0], logprob_errors=(2 * MOST_ON_AVERAGE, MOST), **group)
    assert check_logprobs([*right, wrong]).reason.startswith(words)
    assert check_logprobs([*right, replace(wrong, is_chat=False, is_streamed=True)]).status == "pass"


def test_missing_log_probabilities_fail():
    result = check_logprobs([replace(answer("logprobs"), logprob_errors=(math.inf, math.inf))])
    assert result.status == "fail" and "not every token has one" in result.reason
