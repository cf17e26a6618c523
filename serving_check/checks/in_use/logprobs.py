"""Whether the log-probabilities that the artifact's server reports follow from the artifact's logits."""

import math
from collections.abc import Sequence

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
    told = [(answer.tokens, answer.logprob_errors) for answer in answers if answer.logprob_errors is not None]
    if not told:
        reason = "the artifact's server was not asked for log-probabilities, or does not tell any"
        return CheckResult(NAME, "unknown", "not told", bound, reason)
    tokens = sum(count for count, _ in told)
    mean = math.fsum(count * error for count, (error, _) in told) / tokens
    largest = max(error for _, (_, error) in told)
    is_close = mean <= MOST_ON_AVERAGE and largest <= MOST
    others = _of_alternatives(answers)
    # NaN is not close.
    others_are_close = others is None or others <= MOST_OF_ALTERNATIVES
    reason = f"told with {tokens} greedy tokens of {len(told)} answers"
    if math.isinf(largest):
        reason = "not every token has one"
    elif not is_close:
        reason = (
            "they are not those of the artifact's logits at these tokens: look at the temperature, the base "
            "and the positions that the server takes them from"
        )
    elif not others_are_close:
        reason = (
            f"those of the chosen tokens are right, those of the most likely ones are {others:.2f} nats off "
            "on average: look at how the server finds and names alternatives"
        )
    return CheckResult(
        name=NAME,
        status="pass" if is_close and others_are_close else "fail",
        measured=f"{mean:.3f} nats off on average, {largest:.2f} at most"
        + ("" if others is None else f"; alternatives {others:.3f}"),
        bound=bound,
        reason=reason,
        figures={
            "answers": len(told),
            "tokens": tokens,
            "mean": finite(mean),
            "largest": finite(largest),
            "mean_of_alternatives": None if others is None else finite(others),
        },
    )


def _of_alternatives(answers: Sequence[AnswerInUse]) -> float | None:
    """Return how many nats the log-probabilities are off on average; None if none are told."""
    told = [
        (answer.tokens, answer.alternatives_error)
        for answer in answers
        if answer.alternatives_error is not None
    ]
    tokens = sum(count for count, _ in told)
    return math.fsum(count * error for count, error in told) / tokens if tokens else None
