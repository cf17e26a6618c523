"""The evidence of a load as in use: the speed of both servers, and the artifact's answers compared with its
own logits.

`gate/in_use.py` measures the figures of this file, and `checks/` judge them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from ..settings import DOCUMENTED
from ..workload import percentile
from ..workload.open_loop import OpenLoopResult
from ..workload.spec import RequestRecord
from .gaps import Gap
from .prefill_time import prefill_seconds, prefill_times

PIT_BINS = 20
GAPS_KEPT = 3
"""How many gaps of a block are kept: one burst of other work on the machine may cause several gaps."""
DIGITS = 6


@dataclass(frozen=True)
class PartsInUse:
    """The times of one server under one open loop, separately for prompts and for decoding."""

    __pydantic_config__ = DOCUMENTED

    prompt_seconds: float | None
    """Seconds in which some request had no token yet; null if no request got one."""
    steady_itls_by_m: Mapping[int, tuple[int, float]]
    """The same as `itls_by_m`, but only gaps during which every open request had its first token."""

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "PartsInUse":
        reading = prefill_times(records)
        ends = [end for _, end in reading]

        def is_steady(earlier: float, later: float) -> bool:
            following = bisect_right(ends, earlier)
            return following == len(reading) or reading[following][0] >= later

        return cls(_rounded(prefill_seconds(records)), _medians_by_m(_gaps_by_m(records, is_steady)))


@dataclass(frozen=True)
class SideInUse:
    """The figures of one server under one open loop."""

    __pydantic_config__ = DOCUMENTED

    began: float
    """When it began, in seconds on a clock that all repeats of a run share."""
    duration: float
    """Seconds from the first send to the last end."""
    output_tokens: int
    ttfts: tuple[float | None, ...]
    """Seconds to the first token of each request, or to the whole answer if it was not streamed; null if it
    got none."""
    tpots: tuple[float | None, ...]
    """Seconds per output token after the first, of each request; null if it had too few tokens."""
    itls_by_m: Mapping[int, tuple[int, float]]
    """For each number of decoding requests: the number of gaps between a stream's chunks, and their median in
    seconds."""
    itl_p99: float | None = None
    """The 99th percentile of the seconds between two chunks of one stream; null if each stream had one
    chunk."""
    gaps: tuple[Gap, ...] = ()
    """The longest times in which no stream moved although requests were open, longest first."""
    preemptions: int | None = None
    errors: tuple[str, ...] = ()
    """The error of each request that failed."""
    not_as_asked: tuple[str, ...] = ()
    """For each answer that is not what its request asked for, the deviation in a few words."""
    seeds_kept: tuple[bool, ...] = ()
    """For each sampled answer with an earlier answer's prompt and seed: whether it begins like that
    answer."""
    parts: PartsInUse | None = None
    """The times of prompts and of decoding; null except under a profile of loads."""

    @classmethod
    def of(
        cls, result: OpenLoopResult, not_as_asked: Sequence[str], seeds_kept: Sequence[bool] = ()
    ) -> "SideInUse":
        records = result.records
        gaps_by_m = _gaps_by_m(records)
        itls = [gap for gaps in gaps_by_m.values() for gap in gaps]
        return cls(
            began=round(result.began, DIGITS),
            duration=result.duration,
            output_tokens=sum(record.output_tokens for record in records),
            ttfts=tuple(None if record.error else _rounded(record.first_token_s) for record in records),
            tpots=tuple(_rounded(record.tpot) for record in records),
            itls_by_m=_medians_by_m(gaps_by_m),
            itl_p99=_rounded(percentile(itls, 99)),
            gaps=_still(records),
            preemptions=result.preemptions,
            errors=tuple(record.error for record in records if record.error is not None),
            not_as_asked=tuple(not_as_asked),
            seeds_kept=tuple(seeds_kept),
        )

    @property
    def output_throughput(self) -> float:
        """Return output tokens per second, from the first send to the last end."""
        return self.output_tokens / self.duration if self.duration > 0 else 0.0


@dataclass(frozen=True)
class BlockInUse:
    """The same requests at the same times, sent to the artifact's server and to the baseline's."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    artifact: SideInUse | None
    """The artifact's figures; null if the stage was broken off before its turn."""
    baseline: SideInUse | None
    kinds: tuple[str, ...] = ()
    """The kind of each request, such as `unstreamed sampled chat`; empty in older verdicts, which did not
    record it."""
    prompt_tokens: tuple[int, ...] = ()
    """Number of prompt tokens of each request; empty in older verdicts, which did not record it."""


@dataclass(frozen=True)
class Draws:
    """Sampled tokens of one answer, compared with the probabilities that they should have been drawn with."""

    __pydantic_config__ = DOCUMENTED

    tokens: int
    nats: float
    """The sum of -log p of the drawn tokens."""
    surprisal: float
    """The sum, over the drawn tokens, of -log p minus the entropy of the token's distribution, in nats."""
    variance: float
    """The sum of the variances of -log p: the variance of `surprisal` if tokens are drawn correctly."""
    bins: tuple[int, ...]
    """Number of tokens by randomized probability integral transform, in equal bins from 0 to 1."""
    hotter_nats: float | None = None
    """The sum of -log p of the drawn tokens at twice the temperature; null in older verdicts."""


@dataclass(frozen=True)
class AnswerInUse:
    """One answer of the artifact's server under a load as in use, compared with logits computed in
    process.
    """

    __pydantic_config__ = DOCUMENTED

    kind: str
    prompt_tokens: int
    tokens: int
    m: float
    """The number of requests that decoded together, including this one, mean over its tokens."""
    prompts_beside: int
    """Number of other requests whose prompts were read while this one decoded."""
    off: int
    """Number of tokens too far below the artifact's best logit to be explained by rounding; in a sampled
    answer, number of tokens that were drawn although others are surely more likely."""
    baseline_off: int | None
    """The same number for a greedy answer under the baseline's logits; 0 for a sampled one; null if, over all
    answers, so few tokens are off that the baseline's logits were not computed."""
    beginning: str
    """The first characters of the text."""
    draws: Draws | None = None
    """The drawn tokens compared with their probabilities; null for an answer that was not sampled."""
    logprob_errors: tuple[float, float] | None = None
    """The mean and the largest error of the reported log-probabilities, in nats; null if none were
    requested."""
    alternatives_error: float | None = None
    """The mean error of the log-probabilities reported for the most likely tokens, in nats; null if none were
    requested."""
    repeats_other_seed: bool | None = None
    """Whether a sampled answer equals an earlier one to the same prompt with another seed, or an earlier one
    of several choices; null if there is none."""
    choice: int | None = None
    """Its index among several answers to one request; null where one was asked for."""
    is_chat: bool = False
    is_streamed: bool = True


@dataclass(frozen=True)
class ProfileFigures:
    """A profile of loads: requests with the lengths of a trace."""

    __pydantic_config__ = DOCUMENTED

    name: str
    scale: float
    """The factor applied to the trace's lengths: below 1 if the context or the time is too short for them."""
    prompt_lengths: tuple[tuple[int, ...], ...]
    """Number of tokens of each request's prompt, by block."""
    answer_lengths: tuple[tuple[int, ...], ...]
    blocks: tuple[BlockInUse, ...]


@dataclass(frozen=True)
class FiguresInUse:
    """All figures of a load as in use."""

    __pydantic_config__ = DOCUMENTED

    blocks: tuple[BlockInUse, ...]
    answers: tuple[AnswerInUse, ...] = ()
    unknown: tuple[str, ...] = field(default=())
    """The kinds of requests that the artifact's server does not support, in a few words each."""
    profile: ProfileFigures | None = None
    """The figures of the profile of loads; null if the user asked for none."""

    @property
    def all_blocks(self) -> tuple[BlockInUse, ...]:
        """Return the blocks, including the profile's blocks."""
        return self.blocks + (self.profile.blocks if self.profile else ())


def streams_decoding(records: Sequence[RequestRecord]) -> "DecodingStreams":
    return DecodingStreams(
        sorted(times[0] for record in records if (times := record.decoding)),
        sorted(times[1] for record in records if (times := record.decoding)),
    )


@dataclass(frozen=True)
class DecodingStreams:
    """The times at which requests began to decode and ended, sorted."""

    begins: Sequence[float]
    ends: Sequence[float]

    def at(self, moment: float) -> int:
        """Return the number of requests that decode at that moment, on the clock of the records."""
        return bisect_right(self.begins, moment) - bisect_left(self.ends, moment)


def _gaps_by_m(
    records: Sequence[RequestRecord], counts: Callable[[float, float], bool] = lambda earlier, later: True
) -> dict[int, list[float]]:
    """Return the seconds between two chunks of a stream, by how many requests decoded in the middle of them.

    counts: whether the gap from one moment to another counts
    """
    streams = streams_decoding(records)
    found: dict[int, list[float]] = {}
    for record in records:
        for earlier, later in pairwise(record.arrivals):
            if counts(earlier, later):
                found.setdefault(streams.at((earlier + later) / 2), []).append(later - earlier)
    return found


def _medians_by_m(gaps_by_m: Mapping[int, Sequence[float]]) -> dict[int, tuple[int, float]]:
    return {m: (len(gaps), round(median(gaps), DIGITS)) for m, gaps in sorted(gaps_by_m.items())}


def _still(records: Sequence[RequestRecord]) -> tuple[Gap, ...]:
    """Return the longest times without any token although requests that are streamed were open."""
    records = [record for record in records if record.is_streamed]
    moments = sorted(
        moment
        for record in records
        for moment in (record.start, *record.arrivals, record.start + record.e2el)
    )
    opened, closed = (
        sorted(record.start for record in records),
        sorted(record.start + record.e2el for record in records),
    )
    gaps = [
        Gap(round(earlier, DIGITS), round(later - earlier, DIGITS))
        for earlier, later in pairwise(moments)
        if bisect_right(opened, earlier) > bisect_right(closed, earlier)
    ]
    return tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:GAPS_KEPT])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)
