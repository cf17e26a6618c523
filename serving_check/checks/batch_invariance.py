"""Whether answers have the same bits alone and under load, if a server claims batch invariance."""

from ..evidence.company import COMPANIES, CompanyFigures
from ..evidence.verdict import CheckResult

NAME = "batch invariance"
SHOWN = 90
"""How many characters of a token and its logprobs are shown."""


def check_batch_invariance(figures: CompanyFigures) -> CheckResult:
    """Every token, the token's logprob and its alternatives must be the ones that the prompt got alone."""
    bound = f"{figures.claim}: every token and logprob is the same alone and in a batch"
    answers = COMPANIES * figures.requests
    measured = f"{figures.differing} of {answers} answers differ, {figures.tokens} tokens compared"
    numbers: dict[str, float | int | str | None] = {
        "claim": figures.claim,
        "requests": figures.requests,
        "neighbours": figures.neighbours,
        "tokens": figures.tokens,
        "differing": figures.differing,
        "failed": figures.failed,
    }
    first = figures.first
    if first is not None:
        reason = (
            f"request {first.request} ({first.prompt_tokens} prompt tokens) next to {first.company}: token "
            f"{first.token} was {first.alone[:SHOWN]} alone and {first.together[:SHOWN]} in the batch. "
            "Something the server computes depends on the batch: was it started with --batch-invariance "
            f"{figures.claim}? docs/batch-invariance.md lists every source"
        )
        return CheckResult(NAME, "fail", measured, bound, reason, numbers)
    if figures.failed or not figures.tokens or not figures.neighbours:
        reason = (
            "the largest M leaves no room for other requests; validate at a larger M (--m)"
            if not figures.neighbours
            else f"{figures.failed} requests got no answer with logprobs"
        )
        return CheckResult(NAME, "inconclusive", measured, bound, reason, numbers)
    reason = (
        f"{figures.requests} prompts, greedy and seeded, gave the same bits alone and next to up to "
        f"{figures.neighbours} shorter and longer ones. This verdict's speeds were measured in this mode, so "
        "they include its cost"
    )
    return CheckResult(NAME, "pass", measured, bound, reason, numbers)
