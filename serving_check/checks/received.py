"""Whether clients got every token that was claimed: `usage` beside the streams and the server's counters.

Throughput counts what `usage` says, so what `usage` says has to be true.
"""

from collections.abc import Sequence

from ..evidence.measurement import MeasuredM, answers_of
from ..evidence.verdict import CheckResult

NAME = "tokens received"
LEAST_COUNTED = 0.9
"""Of the tokens claimed, by the server's own counter: one that is a step behind is not yet a lie."""


def check_received(measured: Sequence[MeasuredM]) -> CheckResult:
    """Fail where the artifact's streams, or its server's counter, hold fewer tokens than `usage` claims."""
    bound = "every token that usage claims, in the stream and in the server's own counter"
    artifact = {level.m: answers_of(level.artifact) for level in measured}
    if not any(figures.answers for figures in artifact.values()):
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no answer was read")
    problems = []
    for m, figures in artifact.items():
        if figures.short:
            problems.append(
                f"at M={m} {figures.short} of {figures.answers} streams end early: {figures.received_tokens} "
                f"tokens came where usage claims {figures.claimed_tokens}, so its throughput is of tokens "
                "that nobody got"
            )
        if (
            figures.counted_tokens is not None
            and figures.counted_tokens < LEAST_COUNTED * figures.claimed_tokens
        ):
            problems.append(
                f"at M={m} the server's own counter rose by {figures.counted_tokens} tokens where usage "
                f"claims {figures.claimed_tokens}: the rest was not computed while it was measured"
            )
    claimed = sum(figures.claimed_tokens for figures in artifact.values())
    came = sum(figures.received_tokens for figures in artifact.values())
    counted = [figures.counted_tokens for figures in artifact.values()]
    told = all(figures.token_ids_told for figures in artifact.values())
    how = "by the token ids in the streams" if told else "by the streams' text, tokenized again"
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{came} of {claimed} tokens",
        bound=bound,
        reason="; ".join(problems)
        or f"{how}, of {sum(figures.answers for figures in artifact.values())} answers",
        figures={
            "claimed_tokens": claimed,
            "received_tokens": came,
            "counted_tokens": None if None in counted else sum(count or 0 for count in counted),
            "short_answers": sum(figures.short for figures in artifact.values()),
        },
    )
