"""Whether the served artifact still writes text: greedy, over HTTP, in a batch, compared with the baseline's.

The check catches faults that in-process figures cannot show: a kernel that is wrong only when served, or only
in a batch.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from ..adapters import Endpoint
from ..evidence.evidence import ScoredText
from ..evidence.verdict import CheckResult, finite
from ..settings import Bounds

NAME = "canary text"
LEAST_VARIETY = 0.5
"""The least share of distinct tokens, as a multiple of the baseline's share: below it a text repeats
itself."""
SHOWN_CHARACTERS = 80

Tokens = Sequence[int]
Scorer = Callable[[Tokens, Tokens], float]
"""Computes a continuation's mean nats per token under the baseline from a prompt and the continuation."""


@dataclass(frozen=True)
class Continuation:
    """A server's continuation of one prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


def continuations(
    endpoint: Endpoint,
    prompts: Sequence[Tokens],
    length: int,
    tokenize: Callable[[str], Tokens],
    timeout: float = 600.0,
) -> list[Continuation]:
    """Return greedy continuations of all `prompts`, sent at once so that they decode as one batch.

    Half of them are one request's list of prompts, if the server takes lists. An empty text means a failed
    request.
    """

    def complete(prompt: Tokens) -> str:
        return _complete(endpoint, prompt, length, timeout)

    listed, others = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    with ThreadPoolExecutor(max_workers=max(1, len(prompts))) as pool:
        of_list = pool.submit(_complete_list, endpoint, listed, length, timeout)
        of_others = [pool.submit(complete, prompt) for prompt in others]
        texts = of_list.result() or list(pool.map(complete, listed))
        texts += [text.result() for text in of_others]
    return [
        Continuation(tuple(prompt), tuple(tokenize(text)), text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def scored(texts: Sequence[Continuation], score: Scorer) -> tuple[ScoredText, ...]:
    """Return each text with its likelihood under the baseline, but without its prompt, which may not be
    published.
    """
    return tuple(
        ScoredText(
            continuation.tokens,
            continuation.text,
            score(continuation.prompt, continuation.tokens) if continuation.tokens else None,
        )
        for continuation in texts
    )


def check_canary(
    artifact: Sequence[ScoredText], baseline: Sequence[ScoredText], bounds: Bounds
) -> CheckResult:
    """The artifact's texts must be about as likely to the baseline as its own, and about as varied."""
    silent = sum(not text.tokens for text in artifact)
    written = [text for text in artifact if text.tokens]
    reference = [text for text in baseline if text.tokens]
    bound = (
        f"at most {bounds.max_canary_extra_nats:g} nats per token more than the baseline's own text, scored "
        f"by the baseline, and at least {LEAST_VARIETY:g}× its variety"
    )
    if silent or not written:
        reason = f"{silent} of {len(artifact)} greedy completions came back empty or failed"
        return CheckResult(NAME, "fail", f"{silent} of {len(artifact)} without text", bound, reason)
    if not reference:
        reason = "the baseline's server wrote no text to compare with"
        return CheckResult(NAME, "inconclusive", "no reference text", bound, reason)
    nats, reference_nats = _nats(written), _nats(reference)
    variety = _variety(written) / _variety(reference)
    problems = []
    if not nats - reference_nats <= bounds.max_canary_extra_nats:
        problems.append("its text is not what the baseline would write")
    if variety < LEAST_VARIETY:
        problems.append("its text repeats itself")
    example = min(written, key=lambda text: len(set(text.tokens)))
    shown = example.text[:SHOWN_CHARACTERS]
    reason = f"greedy text of {len(written)} prompts, served as one batch"
    if problems:
        reason = (
            f"{' and '.join(problems)}: it wrote {shown!r}. If the quality check passed, the fault is in "
            "serving: the layout's kernel at this batch size, or the engine"
        )
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{nats - reference_nats:+.3f} nats per token, {variety:.2f}× the variety",
        bound=bound,
        reason=reason,
        figures={
            "nats_per_token": finite(nats),
            "baseline_nats_per_token": finite(reference_nats),
            "variety_ratio": variety,
            "prompts": len(written),
            "example": shown,
        },
    )


def _nats(texts: Sequence[ScoredText]) -> float:
    return fmean(math.nan if text.nats_per_token is None else text.nats_per_token for text in texts)


def _variety(texts: Sequence[ScoredText]) -> float:
    """Return the share of a text's tokens that are distinct, mean over the texts."""
    return fmean(len(set(text.tokens)) / len(text.tokens) for text in texts)


def _complete_list(endpoint: Endpoint, prompts: Sequence[Tokens], length: int, timeout: float) -> list[str]:
    """Return the texts of one request for all `prompts`; nothing if the server does not answer so many."""
    body = {"prompt": [list(prompt) for prompt in prompts], "max_tokens": length, "temperature": 0}
    choices = endpoint.complete_all(body, timeout) if len(prompts) > 1 else None
    if choices is None or len(choices) != len(prompts):
        return []
    return [str(choice.get("text", "")) for choice in choices]


def _complete(endpoint: Endpoint, prompt: Tokens, length: int, timeout: float) -> str:
    body = {"prompt": list(prompt), "max_tokens": length, "temperature": 0}
    choice = endpoint.complete(body, timeout)
    return "" if choice is None else str(choice.get("text", ""))
