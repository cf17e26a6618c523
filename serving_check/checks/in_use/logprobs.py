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


def check_logprobs(answers: Sequence[AnswerInUse]) -> CheckResult:
    """Fail if they differ by more than rounding explains; unknown if the server reports none."""
    bound = f"at most {MOST_ON_AVERAGE:g} nats from those computed here on average, and {MOST:g} at any token"
    told = [(answer.tokens, answer.logprob_errors) for answer in answers if answer.logprob_errors is not None]
    if not told:
        reason = "the artifact's server was not asked for log-probabilities, or does not tell any"
        return CheckResult(NAME, "unknown", "not told", bound, reason)
    tokens = sum(count for count, _ in told)
    mean = math.fsum(count * error for count, (error, _) in told) / tokens
    largest = max(error for _, (_, error) in told)
    is_close = mean <= MOST_ON_AVERAGE and largest <= MOST
    reason = f"told with {tokens} greedy tokens of {len(told)} answers"
    if math.isinf(largest):
        reason = "not every token has one"
    elif not is_close:
        reason = (
            "they are not those of the artifact's logits at these tokens: look at the temperature, the base "
            "and the positions that the server takes them from"
        )
    return CheckResult(
        name=NAME,
        status="pass" if is_close else "fail",
        measured=f"{mean:.3f} nats off on average, {largest:.2f} at most",
        bound=bound,
        reason=reason,
        figures={"answers": len(told), "tokens": tokens, "mean": finite(mean), "largest": finite(largest)},
    )
