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
    artifact = {one.m: answers_of(one.artifact) for one in measured}
    if not any(one.answers for one in artifact.values()):
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no answer was read")
    problems = []
    for m, one in artifact.items():
        if one.short:
            problems.append(
                f"at M={m} {one.short} of {one.answers} streams end early: {one.received_tokens} tokens came "
                f"where usage claims {one.claimed_tokens}, so its throughput is of tokens that nobody got"
            )
        if one.counted_tokens is not None and one.counted_tokens < LEAST_COUNTED * one.claimed_tokens:
            problems.append(
                f"at M={m} the server's own counter rose by {one.counted_tokens} tokens where usage claims "
                f"{one.claimed_tokens}: the rest was not computed while it was measured"
            )
    claimed = sum(one.claimed_tokens for one in artifact.values())
    came = sum(one.received_tokens for one in artifact.values())
    counted = [one.counted_tokens for one in artifact.values()]
    told = all(one.token_ids_told for one in artifact.values())
    how = "by the token ids in the streams" if told else "by the streams' text, tokenized again"
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{came} of {claimed} tokens",
        bound=bound,
        reason="; ".join(problems) or f"{how}, of {sum(one.answers for one in artifact.values())} answers",
        figures={
            "claimed_tokens": claimed,
            "received_tokens": came,
            "counted_tokens": None if None in counted else sum(count or 0 for count in counted),
            "short_answers": sum(one.short for one in artifact.values()),
        },
    )
