"""Whether answers are the same bits alone and under load, where a server claims to be batch-invariant."""

from ..evidence.company import COMPANIES, CompanyFigures
from ..evidence.verdict import CheckResult

NAME = "batch invariance"
SHOWN = 90
"""Characters of what was said of a token."""


def check_batch_invariance(figures: CompanyFigures) -> CheckResult:
    """Every token, its logprob and its alternatives' must be those that the prompt got alone."""
    bound = f"{figures.claim}: every token and logprob the same alone and among others"
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
            f"request {first.request} ({first.prompt_tokens} prompt tokens) beside {first.company}: token "
            f"{first.token} was {first.alone[:SHOWN]} alone and {first.together[:SHOWN]} there. Something "
            "that the server computes follows the batch: was it started with --batch-invariance "
            f"{figures.claim}? docs/batch-invariance.md lists every source"
        )
        return CheckResult(NAME, "fail", measured, bound, reason, numbers)
    if figures.failed or not figures.tokens or not figures.neighbours:
        reason = (
            "no other request fits beside a prompt; validate at a larger M (--m)"
            if not figures.neighbours
            else f"{figures.failed} requests had no answer with logprobs"
        )
        return CheckResult(NAME, "inconclusive", measured, bound, reason, numbers)
    reason = (
        f"{figures.requests} prompts, greedy and seeded, alone and beside up to {figures.neighbours} others, "
        "shorter and longer; the speeds of this verdict were measured in this mode and hold its cost"
    )
    return CheckResult(NAME, "pass", measured, bound, reason, numbers)
