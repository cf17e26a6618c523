"""Counts over the answers under load: tokens received and claimed, text and tokens, likeness.

The module only counts, on answers that the workload generator kept; `checks/` judge the counts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..settings import DOCUMENTED
from ..workload import RequestRecord, WorkloadResult
from ..workload.answers import Answer

T = TypeVar("T")
LEAST_RETOKENIZED = 0.8
"""The share of the claimed tokens that a text must give when it is tokenized again: a few may be missing."""
LEAST_FOR_LIKENESS = 4
"""How many tokens an answer must have for it to count as one repeated token."""


@dataclass(frozen=True)
class TokenText:
    """The two functions of a tokenizer with which answers are examined."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class AnswerFigures:
    """The answers of one repeat, or of several added up; failed requests are left out."""

    __pydantic_config__ = DOCUMENTED

    answers: int = 0
    token_ids_told: bool = True
    """Whether the server streams token ids beside the text; otherwise the text is tokenized again."""
    claimed_tokens: int = 0
    """Number of tokens according to `usage`."""
    received_tokens: int = 0
    """Number of tokens in the streams' chunks."""
    counted_tokens: int | None = 0
    """By how much the server's own counter of generated tokens rose; null if it has no such counter."""
    short: int = 0
    """Number of answers with fewer tokens than `usage` claims for them."""
    not_its_tokens: int = 0
    """Number of answers whose text is not the text of their token ids."""
    duplicates: int = 0
    """Number of answers that equal an answer to another prompt in the same repeat."""
    one_token: int = 0
    """Number of answers that repeat a single token."""
    distinct_share: float = 0.0
    """The share of distinct tokens in an answer, summed over answers."""

    @property
    def variety(self) -> float:
        """Return the share of distinct tokens in an answer, 0 to 1, mean over answers."""
        return self.distinct_share / self.answers if self.answers else 0.0

    @classmethod
    def sum(cls, several: Iterable["AnswerFigures"]) -> "AnswerFigures":
        total = cls()
        for figures in several:
            counts = (total.counted_tokens, figures.counted_tokens)
            total = cls(
                total.answers + figures.answers,
                total.token_ids_told and figures.token_ids_told,
                total.claimed_tokens + figures.claimed_tokens,
                total.received_tokens + figures.received_tokens,
                None if counts[0] is None or counts[1] is None else counts[0] + counts[1],
                total.short + figures.short,
                total.not_its_tokens + figures.not_its_tokens,
                total.duplicates + figures.duplicates,
                total.one_token + figures.one_token,
                total.distinct_share + figures.distinct_share,
            )
        return total


@dataclass(frozen=True)
class ServedText:
    """One answer under load, in the form that is scored."""

    m: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


def answer_figures(result: WorkloadResult, tokenizer: TokenText) -> AnswerFigures:
    """Return the figures of one repeat's answers, without answers that were not kept."""
    records = [record for record in result.requests if _is_kept(record)]
    tokens = [_received(record, tokenizer) for record in records]
    told = all(record.answer and record.answer.token_ids is not None for record in records)
    least = 1.0 if told else LEAST_RETOKENIZED
    pairs = list(zip(records, tokens, strict=True))
    counted = result.engine.generation_tokens
    return AnswerFigures(
        answers=len(records),
        token_ids_told=told,
        claimed_tokens=sum(record.output_tokens for record in records),
        received_tokens=sum(map(len, tokens)),
        counted_tokens=None if counted is None else int(counted),
        short=sum(len(ids) < least * record.output_tokens for record, ids in pairs),
        not_its_tokens=sum(not text_is_of(record.answer, tokenizer) for record in records),
        duplicates=len(records) - len({_text(record) for record in records}),
        one_token=sum(len(ids) >= LEAST_FOR_LIKENESS and len(set(ids)) == 1 for ids in tokens),
        distinct_share=sum(len(set(ids)) / len(ids) for ids in tokens if ids),
    )


def spread_evenly(several: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of `several`, spread evenly."""
    step = max(1.0, len(several) / count)
    return [several[int(index * step)] for index in range(min(count, len(several)))]


def served_texts(result: WorkloadResult, tokenizer: TokenText, count: int) -> list[ServedText]:
    """Return at most `count` answers of one repeat, spread over all of it."""
    kept = [record for record in result.requests if _is_kept(record)]
    return [
        ServedText(result.spec.m, record.prompt, tuple(_received(record, tokenizer)), _text(record))
        for record in spread_evenly(kept, count)
    ]


def _is_kept(record: RequestRecord) -> bool:
    return record.error is None and record.answer is not None


def _received(record: RequestRecord, tokenizer: TokenText) -> Sequence[int]:
    """Return the tokens of a kept answer: the ids in its stream, or its text tokenized again."""
    if record.answer is None or record.answer.token_ids is None:
        return tokenizer.encode(_text(record))
    return list(record.answer.token_ids)


def _text(record: RequestRecord) -> str:
    return "" if record.answer is None else record.answer.text


def text_is_of(answer: Answer | None, tokenizer: TokenText) -> bool:
    """Say whether an answer's text is that of its tokens, apart from white space and characters cut in
    two.
    """
    if answer is None or answer.token_ids is None:
        return True
    return bare(tokenizer.decode(list(answer.token_ids))) == bare(answer.text)


def bare(text: str) -> str:
    """Return `text` without white space at either end and without characters cut in two."""
    return text.replace("\N{REPLACEMENT CHARACTER}", "").strip()
