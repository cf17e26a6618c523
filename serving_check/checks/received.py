"""Whether clients got every token: compares `usage` with the streams and the server's counters.

Throughput is computed from `usage`, so `usage` must be true.
"""

from collections.abc import Sequence

from ..evidence.measurement import MeasuredM, answers_of
from ..evidence.verdict import CheckResult

NAME = "tokens received"
LEAST_COUNTED = 0.9
"""The share of the claimed tokens that the server's own counter must show; the counter may lag by a step."""


def check_received(measured: Sequence[MeasuredM]) -> CheckResult:
    """Fail if the artifact's streams, or its server's counter, hold fewer tokens than `usage` claims."""
    bound = "every token that usage claims appears in the stream and in the server's own counter"
    artifact = {level.m: answers_of(level.artifact) for level in measured}
    if not any(figures.answers for figures in artifact.values()):
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no answer was read")
    problems = []
    for m, figures in artifact.items():
        if figures.short:
            problems.append(
                f"at M={m} {figures.short} of {figures.answers} streams end early: clients received "
                f"{figures.received_tokens} tokens, usage claims {figures.claimed_tokens}, so the throughput "
                "counts tokens that nobody received"
            )
        if (
            figures.counted_tokens is not None
            and figures.counted_tokens < LEAST_COUNTED * figures.claimed_tokens
        ):
            problems.append(
                f"at M={m} the server's own counter rose by {figures.counted_tokens} tokens, usage "
                f"claims {figures.claimed_tokens}: the rest was not computed during the measurement"
            )
    claimed = sum(figures.claimed_tokens for figures in artifact.values())
    came = sum(figures.received_tokens for figures in artifact.values())
    counted = [figures.counted_tokens for figures in artifact.values()]
    told = all(figures.token_ids_told for figures in artifact.values())
    how = "counted from token ids" if told else "counted from text, tokenized again"
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{came} of {claimed} tokens",
        bound=bound,
        reason="; ".join(problems)
        or f"{how}, in {sum(figures.answers for figures in artifact.values())} streams",
        figures={
            "claimed_tokens": claimed,
            "received_tokens": came,
            "counted_tokens": None if None in counted else sum(count or 0 for count in counted),
            "short_answers": sum(figures.short for figures in artifact.values()),
        },
    )
