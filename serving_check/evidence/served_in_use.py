"""Chooses the answers of a load as in use that are compared with logits computed in process, and records
their conditions.

Each answer costs forward passes, so few are chosen, spread over contexts, Ms, neighbours and kinds.
`pipeline/validation/in_process.py` scores the answers.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..workload.answers import Answer
from ..workload.open_loop import OpenLoopResult
from ..workload.planned_request import WHOLE, Adjustments, Kind, PlannedRequest, Truncation
from ..workload.spec import RequestRecord
from .answer_figures import TokenText
from .as_asked import REPLACEMENT

GREEDY_ANSWERS = 48
"""How many greedy answers are chosen; each costs a forward pass of both models."""
LONGEST_ANSWERS = 3
"""How many answers with the longest contexts are chosen before all others."""
SAMPLED_TOKENS = 2500
"""How many sampled tokens are chosen, besides all of requests for several answers. A temperature that is 10%
too low moves their summed surprisal by 0.092 √(2,500 v) standard deviations, if v is the variance of one
token's surprisal: 8.7 for the bundled model, 4.6 for a model with v = 1."""
PREFIX = 16
"""Tokens from which on prompts that begin alike may share what a server keeps of them."""

WORDS = "one two three"


TopLogprobs = tuple[tuple[int | None, float], ...]
"""Tokens and their log-probabilities in nats, the most likely first; None if only its text is known, which
other tokens have as well."""


@dataclass(frozen=True)
class ServedInUse:
    """One answer of the artifact's server under a load as in use, in the form that is scored."""

    kind: Kind
    """`sampled` of each of several choices."""
    prompt: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    text: str
    temperature: float
    seed: int | None
    m: float
    """The number of requests that decoded together, including this one, mean over its tokens."""
    prompts_beside: int
    """Number of other requests whose prompts were read while this one decoded."""
    logprobs: tuple[float | None, ...] | None = None
    """The log-probabilities in nats, as the server reported them; None if it was not asked."""
    alternatives: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in the place of each token, as the server reported them; empty if it was not
    asked."""
    end_token: int | None = None
    """The end-of-sequence token if the request had a least length, so that this token could not be chosen."""
    adjustments: Adjustments | None = None
    """The penalties and the bias that its tokens were chosen with."""
    truncation: Truncation = WHOLE
    """The tokens that might be drawn."""
    repeats_other_seed: bool | None = None
    """Whether the answer equals an earlier one to the same prompt with another seed, or an earlier choice of
    the same request; None if there is none."""
    choice: int | None = None
    """The index of the answer among several choices of one request; None if only one was requested."""
    is_chat: bool = False
    is_streamed: bool = True

    @property
    def context(self) -> int:
        """Return the context length at the end of the answer, in tokens."""
        return len(self.prompt) + len(self.tokens)


def answers_to_score(results: Sequence[OpenLoopResult], tokenizer: TokenText) -> tuple[ServedInUse, ...]:
    """Return some greedy answers of all kinds, then sampled ones; the same results give the same choice.

    results: the results of the artifact's server, in the order of time

    Sampled answers are left out if the server reports no token ids: tokenizing the text again may give other
    tokens.
    """
    found = [answer for result in results for answer in _answers(result, tokenizer)]
    greedy = [answer for answer in found if answer.kind != "sampled"]
    chosen = list(_spread(greedy))[:GREEDY_ANSWERS]
    sampled = _beside_other_seeds([answer for answer in found if answer.kind == "sampled"])
    chosen += [answer for answer in sampled if answer.choice is not None]
    drawn = 0
    for answer in _spread([answer for answer in sampled if answer.choice is None]):
        if drawn >= SAMPLED_TOKENS:
            break
        chosen.append(answer)
        drawn += len(answer.tokens)
    return tuple(chosen)


def _answers(result: OpenLoopResult, tokenizer: TokenText) -> Iterator[ServedInUse]:
    """Yield all answers that can be scored."""
    streams = _Streams(result.records)
    for request, record in zip(result.requests, result.records, strict=True):
        if request.kind == "aborted" or record.error is not None or record.answer is None:
            continue
        if request.text is not None and record.prompt_tokens != len(request.prompt):
            # Perhaps the engine always makes another prompt of a text: `as_asked.py` tells.
            continue
        kind: Kind = "sampled" if request.choices > 1 else request.kind
        for index, answer in enumerate((record.answer, *record.other_choices)):
            tokens = _tokens(request, answer, tokenizer)
            if not tokens or record.decoding is None:
                continue
            yield ServedInUse(
                kind=kind,
                prompt=request.prompt,
                tokens=tokens,
                text=answer.text,
                temperature=request.temperature,
                seed=request.seed,
                m=streams.m_of(record),
                prompts_beside=streams.prompts_beside(record),
                logprobs=answer.logprobs if request.kind == "logprobs" else None,
                alternatives=_alternatives(answer, tokens, tokenizer),
                end_token=request.end_token,
                adjustments=request.adjustments,
                truncation=request.truncation,
                choice=index if request.choices > 1 else None,
                is_chat=bool(request.messages),
                is_streamed=request.is_streamed,
            )


def _alternatives(answer: Answer, tokens: Sequence[int], tokenizer: TokenText) -> tuple[TopLogprobs, ...]:
    """Return the alternatives to each token. They have ids only if the server names tokens as the tokenizer
    does, that is, if most chosen tokens are named so.
    """
    told = (answer.alternatives or ())[: len(tokens)]
    named = sum(entry.chosen == tokenizer.decode([token]) for entry, token in zip(told, tokens, strict=False))
    ids = _Ids(tokenizer) if named > len(told) / 2 and _tells_apart(tokenizer) else None
    return tuple(
        tuple(
            (None if ids is None else ids.of(text), logprob)
            for text, logprob in sorted(entry.logprobs.items(), key=lambda item: -item[1])
        )
        for entry in told
    )


def _tells_apart(tokenizer: TokenText) -> bool:
    """Say whether a token's own text has the white space before it. Without, words and their endings have one
    text, and the text does not say which token it is (SentencePiece, WordPiece)."""
    tokens = tokenizer.encode(WORDS)
    return "".join(tokenizer.decode([token]) for token in tokens) == tokenizer.decode(tokens)


class _Ids:
    """Finds the token id of a text, if the text is exactly one token."""

    def __init__(self, tokenizer: TokenText):
        self._tokenizer = tokenizer
        self._known: dict[str, int | None] = {}

    def of(self, text: str) -> int | None:
        if text not in self._known:
            ids = [] if REPLACEMENT in text else self._tokenizer.encode(text)
            is_one = len(ids) == 1 and self._tokenizer.decode(ids) == text
            self._known[text] = ids[0] if is_one else None
        return self._known[text]


def _tokens(request: PlannedRequest, answer: Answer, tokenizer: TokenText) -> tuple[int, ...]:
    """Return the tokens that the model chose; an empty result if the tokens are not known."""
    if answer.token_ids is not None:
        # What ends an answer of a least length was not chosen freely.
        return tuple(answer.token_ids)[: request.min_tokens or None]
    if request.temperature or answer.is_parsed:
        return ()
    # The last token of a text that was cut, by a stop string or within a character, may be another one.
    return tuple(tokenizer.encode(answer.text))[:-1][: request.min_tokens or None]


class _Streams:
    """The times at which the requests of one open loop began, decoded and ended."""

    def __init__(self, records: Sequence[RequestRecord]):
        decoding = [times for record in records if (times := record.decoding)]
        self._firsts = sorted(first for first, _ in decoding)
        self._lasts = sorted(last for _, last in decoding)
        self._sent = sorted(record.start for record in records)
        self._read = sorted(map(_prompt_read, records))

    def m_of(self, record: RequestRecord) -> float:
        """Return how many requests decoded, mean over the chunks of `record`, or over its beginning, middle
        and end."""
        moments = record.arrivals
        if not moments and (times := record.decoding):
            moments = [times[0], fmean(times), times[1]]
        return fmean(bisect_right(self._firsts, now) - bisect_left(self._lasts, now) for now in moments)

    def prompts_beside(self, record: RequestRecord) -> int:
        """Return how many other requests were sent before the record's last chunk and got their first chunk
        after its first."""
        assert record.decoding is not None
        first, last = record.decoding
        itself = not record.is_streamed and record.start < last
        return bisect_left(self._sent, last) - bisect_right(self._read, first) - itself


def _prompt_read(record: RequestRecord) -> float:
    return record.start + (record.e2el if record.ttft is None else record.ttft)


def _beside_other_seeds(sampled: Sequence[ServedInUse]) -> list[ServedInUse]:
    """Return the sampled answers without repetitions of a prompt and seed, which are no independent draws;
    each one says whether it equals an answer to its prompt with another seed.
    """
    by_prompt: dict[tuple[int, ...], list[ServedInUse]] = {}
    kept = []
    for answer in sampled:
        earlier = by_prompt.setdefault(answer.prompt, [])
        if all((other.seed, other.choice) != (answer.seed, answer.choice) for other in earlier):
            repeats = any(other.tokens == answer.tokens for other in earlier) if earlier else None
            kept.append(replace(answer, repeats_other_seed=repeats))
            earlier.append(answer)
    return kept


def _spread(answers: Sequence[ServedInUse]) -> Iterator[ServedInUse]:
    """Yield all answers in order: first the longest contexts, then each time an answer of the kind that was
    chosen least often so far.

    Answers are alike if they have the same kind, contexts and Ms within a power of two, and if both or
    neither have neighbours, and a prompt that begins like another one.
    """
    left = sorted(answers, key=lambda answer: -answer.context)
    beginnings = Counter(answer.prompt[:PREFIX] for answer in answers)
    likes = [(*_like(answer), ("prefix", beginnings[answer.prompt[:PREFIX]] > 1)) for answer in left]
    chosen: Counter[Hashable] = Counter()
    for turn in range(len(left)):
        at = 0 if turn < LONGEST_ANSWERS else _least(likes, chosen)
        chosen.update(likes.pop(at))
        yield left.pop(at)


def _like(answer: ServedInUse) -> tuple[Hashable, ...]:
    return (
        ("kind", answer.kind),
        ("context", answer.context.bit_length()),
        ("m", round(answer.m).bit_length()),
        ("company", answer.prompts_beside > 0),
        ("seeds", answer.repeats_other_seed is not None),
        ("way", answer.kind, answer.is_chat, answer.is_streamed),
    )


def _least(likes: Sequence[tuple[Hashable, ...]], chosen: Counter[Hashable]) -> int:
    """Return the index of the first answer that resembles the chosen ones least, summed over all respects in
    which answers are compared.
    """
    return min(range(len(likes)), key=lambda index: sum(chosen[like] for like in likes[index]))
