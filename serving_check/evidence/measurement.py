"""The measurements of the interleaved repeats at one M, on every side: the raw figures of every check.

The verdict keeps the measurements, so that its readers can judge again. `interleaving.py` runs repeats;
`judge.py` and `checks/` judge them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..settings import DOCUMENTED
from ..statistics.decide import GROUP, block_log_ratio
from ..workload import RequestRecord, WorkloadResult, percentile
from ..workload.engine_work import EngineWork
from .answer_figures import AnswerFigures, TokenText, answer_figures
from .gaps import NO_GAPS, LongestGaps, longest_gaps
from .prefill_time import prefill_seconds
from .steady_decoding import steady_decoding

SLOWEST = 95
"""The percentile of a repeat's requests that stands for its slowest: a single straggler does not count."""
DIGITS = 6
"""Decimal digits of latencies in seconds: they are kept to the microsecond."""


@dataclass(frozen=True)
class Repeat:
    """One repeat of one side: every figure that a check or the curve reads."""

    __pydantic_config__ = DOCUMENTED

    seed: int
    """The seed of its prompts."""
    duration: float
    """Seconds from the first send to the last completion."""
    requests: int
    output_tokens: int
    """Number of output tokens of all requests together."""
    ttfts: tuple[float, ...]
    """Seconds to the first token of each request that did not fail."""
    tpots: tuple[float, ...]
    """Seconds per output token after the first, of each request with at least two tokens."""
    decoding_together: float
    """How many requests decoded together, as the average output token saw it."""
    waiting_max: float | None
    """Most requests seen queued."""
    kv_usage_max: float | None
    """Largest share of the KV cache seen in use, 0 to 1."""
    preemptions: int | None
    errors: tuple[str, ...] = ()
    """The error of each request that failed."""
    engine: EngineWork = field(default_factory=EngineWork)
    """The server's own counts of its work during the repeat."""
    began: float = 0.0
    """When the repeat began, in seconds on a clock that all repeats of a run share."""
    itl_p999: float | None = None
    """The 99.9th percentile of the seconds between two chunks of one stream; null if each stream had one
    chunk."""
    itl_max: float | None = None
    streamed_share: float | None = None
    """The share of a request's time after its first chunk, 0 to 1, median; null for requests of one token."""
    gaps: LongestGaps = NO_GAPS
    answers: AnswerFigures | None = None
    """The figures of the answers; null if the answers were not kept."""
    steady_decoding: float | None = None
    """Output tokens per second of M streams outside prefill; null if at most half of them decode together."""
    prefill_seconds: float | None = None
    """Seconds in which some request had no token yet; null in older verdicts, which did not record it."""
    idle_cpu_seconds: float | None = None
    """CPU time that the other side's server used during the repeat; null if it was not started here."""
    others_cpu_seconds: float | None = None
    """CPU time that processes other than the servers and their client used during the repeat on the servers'
    cores; null if it is not known."""
    stolen_seconds: float | None = None
    """Seconds that a hypervisor took from these cores during the repeat."""

    @classmethod
    def of(cls, result: WorkloadResult, tokenizer: TokenText | None = None) -> "Repeat":
        return cls(
            seed=result.spec.seed,
            duration=result.duration,
            requests=len(result.requests),
            output_tokens=result.output_tokens,
            ttfts=tuple(round(value, DIGITS) for value in result.ttfts),
            tpots=tuple(round(value, DIGITS) for value in result.tpots),
            decoding_together=decoding_together(result),
            waiting_max=result.waiting_max,
            kv_usage_max=_largest([sample.kv_cache_usage for sample in result.samples]),
            preemptions=result.preemptions,
            errors=tuple(result.errors),
            engine=result.engine,
            began=round(result.began, DIGITS),
            itl_p999=percentile(result.itls, 99.9),
            itl_max=percentile(result.itls, 100),
            streamed_share=percentile(result.streamed_shares, 50),
            gaps=longest_gaps(result),
            answers=None if tokenizer is None else answer_figures(result, tokenizer),
            steady_decoding=steady_decoding(result),
            prefill_seconds=prefill_seconds(result.requests),
        )

    @property
    def output_throughput(self) -> float:
        """Return output tokens per second, ramp-up and ramp-down of the batch included."""
        return self.output_tokens / self.duration if self.duration > 0 else 0.0


@dataclass
class Block:
    """Repeats close together in time: one of the artifact, one of the baseline, one of a rival, if any."""

    __pydantic_config__ = DOCUMENTED

    artifact: list[Repeat] = field(default_factory=list)
    baseline: list[Repeat] = field(default_factory=list)
    rival: list[Repeat] = field(default_factory=list)
    restarts: int = 0
    """How often the servers had been restarted by then."""

    @property
    def repeats(self) -> list[Repeat]:
        return [*self.artifact, *self.baseline, *self.rival]

    @property
    def errors(self) -> list[str]:
        return [error for repeat in (*self.artifact, *self.baseline) for error in repeat.errors]

    def log_ratio(self, figure: Callable[[Repeat], float | None], over_rival: bool = False) -> float | None:
        """Return the block's log ratio of `figure`, artifact over baseline or over rival.

        The result is None if a repeat has no such figure, or the block was broken off.
        """
        artifact = [figure(result) or 0.0 for result in self.artifact]
        other = [figure(result) or 0.0 for result in (self.rival if over_rival else self.baseline)]
        if not artifact or not other or min(artifact + other) <= 0:
            return None
        return block_log_ratio(artifact, other)


@dataclass
class MeasuredM:
    """One level of load: every block at one M, oldest first."""

    __pydantic_config__ = DOCUMENTED

    m: int
    blocks: list[Block] = field(default_factory=list)
    warmups: list[Block] = field(default_factory=list)
    """Shorter repeats before the first block, enough to tell that an M is hopeless."""
    prompt_blocks: list[Block] = field(default_factory=list)
    """Blocks with shorter answers, after everything but the speed of prompts was decided."""

    @property
    def rounds(self) -> int:
        return len(self.blocks) + len(self.prompt_blocks)

    @property
    def of_prompts(self) -> "MeasuredM":
        """Return the level with all blocks that show how fast prompts are read."""
        return replace(self, blocks=[*self.blocks, *self.prompt_blocks], prompt_blocks=[])

    @property
    def artifact(self) -> list[Repeat]:
        return [result for block in self.blocks for result in block.artifact]

    @property
    def baseline(self) -> list[Repeat]:
        return [result for block in self.blocks for result in block.baseline]

    def group_means(self, figure: Callable[[Repeat], float | None], over_rival: bool = False) -> list[float]:
        """Return the mean log ratio of each complete group of blocks on restarted servers."""
        groups: dict[int, list[Block]] = {}
        for block in self.blocks:
            if block.restarts:
                groups.setdefault(block.restarts, []).append(block)
        found = [_log_ratios(blocks, figure, over_rival) for blocks in groups.values()]
        return [math.fsum(values) / GROUP for values in found if len(values) == GROUP]

    @property
    def rival(self) -> list[Repeat]:
        return [result for block in self.blocks for result in block.rival]

    def log_ratios(self, figure: Callable[[Repeat], float | None], over_rival: bool = False) -> list[float]:
        return _log_ratios(self.blocks, figure, over_rival)

    @property
    def first_looks(self) -> list[float]:
        """Return the log ratios of throughput of the first two blocks of all, warm-ups among them."""
        return _log_ratios([*self.warmups, *self.blocks][:2], output_throughput)

    def shows(self, figure: Callable[[Repeat], float | None]) -> bool:
        """Say whether most of the level's blocks have `figure` on both sides."""
        return 2 * len(self.log_ratios(figure)) > len(self.blocks)


def _log_ratios(
    blocks: Sequence[Block], figure: Callable[[Repeat], float | None], over_rival: bool = False
) -> list[float]:
    return [ratio for block in blocks if (ratio := block.log_ratio(figure, over_rival)) is not None]


def answers_of(repeats: Sequence[Repeat]) -> AnswerFigures:
    """Return the sum over all `repeats` that kept answers."""
    return AnswerFigures.sum(repeat.answers for repeat in repeats if repeat.answers is not None)


def output_throughput(result: Repeat) -> float:
    return result.output_throughput


def decoding_throughput(result: Repeat) -> float | None:
    return result.steady_decoding


def prompts_per_second(result: Repeat) -> float | None:
    """Return prompt tokens per second, in the times in which some request had no token yet."""
    return result.requests / result.prefill_seconds if result.prefill_seconds else None


def slowest_tpot(result: Repeat) -> float | None:
    return percentile(list(result.tpots), SLOWEST)


def slowest_ttft(result: Repeat) -> float | None:
    return percentile(list(result.ttfts), SLOWEST)


def decoding_together(result: WorkloadResult) -> float:
    """Return how many requests decoded together, as the average output token saw it.

    The number comes from the server's own counts of steps. If the server does not count steps, the number is
    the overlap of the streams that clients received, which needs nothing from the server. Neither of the two
    sources counts queued requests.
    """
    if result.steps_by_running:
        tokens = sum(running * steps for running, steps in result.steps_by_running.items())
        return sum(running**2 * steps for running, steps in result.steps_by_running.items()) / tokens
    return _overlap(result.requests)


def _overlap(requests: Sequence[RequestRecord]) -> float:
    """Return the mean number of streams between first chunk and end, weighted by that number."""
    events: list[tuple[float, int]] = []
    for record in requests:
        if record.error is None and record.ttft is not None:
            events += [(record.start + record.ttft, 1), (record.start + record.e2el, -1)]
    running, then, weighted, total = 0, -math.inf, 0.0, 0.0
    for now, change in sorted(events):
        if running:
            weighted += running**2 * (now - then)
            total += running * (now - then)
        running, then = running + change, now
    return weighted / total if total else 0.0


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
