"""Whether the log-probabilities that the artifact's server reports follow from the artifact's logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...evidence.in_use import AnswerInUse
from ...evidence.verdict import CheckResult, finite

NAME = "log-probabilities"
MOST_ON_AVERAGE = 0.1
"""Mean error in nats. Sound artifacts of the bundled model, served on a CPU among 16 requests, showed 0.004
(INT4), 0.003 (KVarN cache) and 0.037 (NVFP4 with 4-bit inputs, whose codes flip with the order of sums).
Two roundings to bfloat16 of logits between 16 and 32 differ by 0.04 on average. On that model
log-probabilities of the token before would be 0.47 off, and logarithms to base 10 would be 0.26 off."""
MOST = 2.5
"""Nats at one token: twice the largest in the same runs, 1.2 of 2,600 tokens in NVFP4 with 4-bit inputs."""

MOST_OF_ALTERNATIVES = 0.3
"""The most nats on average for the five most likely tokens. A sound artifact showed 0.022 (INT4, served). The
bundled model in bfloat16 showed 0.011 (INT4) and 0.067 (NVFP4 with 4-bit inputs) between 160 steps and one
pass over the same tokens. Alternatives of the token before were 5.9 off."""


def check_logprobs(answers: Sequence[AnswerInUse]) -> CheckResult:
    """Fail if the log-probabilities differ by more than rounding explains; unknown if the server reports
    none.
    """
    bound = (
        f"at most {MOST_ON_AVERAGE:g} nats from those computed here on average, and {MOST:g} at any token; "
        f"{MOST_OF_ALTERNATIVES:g} on average of alternatives"
    )
    told = [answer for answer in answers if answer.logprob_errors is not None]
    if not told:
        reason = "the artifact's server was not asked for log-probabilities, or does not tell any"
        return CheckResult(NAME, "unknown", "not told", bound, reason)
    by_group = {
        _group(answer): [other for other in told if _group(other) == _group(answer)] for answer in told
    }
    wrong = {group: problem for group, some in by_group.items() if (problem := _problem(_errors_of(some)))}
    errors = _errors_of(told)
    reason = f"told with {errors.tokens} greedy tokens of {len(told)} answers"
    # With all groups wrong the groups explain nothing.
    if len(wrong) == len(by_group):
        reason = _problem(errors) or next(iter(wrong.values()))
    elif wrong:
        reason = "; ".join(f"only {group}: {problem}" for group, problem in wrong.items())
    others = errors.of_alternatives
    return CheckResult(
        name=NAME,
        status="fail" if wrong else "pass",
        measured=f"{errors.mean:.3f} nats off on average, {errors.largest:.2f} at most"
        + ("" if others is None else f"; alternatives {others:.3f}"),
        bound=bound,
        reason=reason,
        figures={
            "answers": len(told),
            "tokens": errors.tokens,
            "mean": finite(errors.mean),
            "largest": finite(errors.largest),
            "mean_of_alternatives": None if others is None else finite(others),
        },
    )


def _group(answer: AnswerInUse) -> str:
    """Return the form of the request: a server has code of its own for each."""
    return ("" if answer.is_streamed else "unstreamed ") + ("chats" if answer.is_chat else "completions")


@dataclass(frozen=True)
class _Errors:
    """By how many nats log-probabilities are off."""

    tokens: int
    mean: float
    largest: float
    of_alternatives: float | None
    """The mean of alternatives; None if none are told."""


def _errors_of(answers: Sequence[AnswerInUse]) -> _Errors:
    told = [
        (answer.tokens, *answer.logprob_errors) for answer in answers if answer.logprob_errors is not None
    ]
    others = [
        (answer.tokens, answer.alternatives_error)
        for answer in answers
        if answer.alternatives_error is not None
    ]
    return _Errors(
        tokens=sum(count for count, _, _ in told),
        mean=_mean([(count, error) for count, error, _ in told]) or 0.0,
        largest=max(error for _, _, error in told),
        of_alternatives=_mean(others),
    )


def _mean(errors: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean error over all tokens, from pairs of a number of tokens and their mean error."""
    tokens = sum(count for count, _ in errors)
    return math.fsum(count * error for count, error in errors) / tokens if tokens else None


def _problem(errors: _Errors) -> str | None:
    """Return what is wrong with the log-probabilities; None if they are close enough."""
    if math.isinf(errors.largest):
        return "not every token has one"
    # NaN is not close.
    if not (errors.mean <= MOST_ON_AVERAGE and errors.largest <= MOST):
        return (
            "they are not those of the artifact's logits at these tokens: look at the temperature, the base "
            "and the positions that the server takes them from"
        )
    if errors.of_alternatives is not None and not errors.of_alternatives <= MOST_OF_ALTERNATIVES:
        return (
            f"those of the chosen tokens are right, those of the most likely ones are "
            f"{errors.of_alternatives:.2f} nats off on average: look at how the server finds and names "
            "alternatives"
        )
    return None
