"""The requests for a server, and their results: plain data, with the field's usual metrics.

`sending.py` sends the requests.
"""

import itertools
import math
from dataclasses import dataclass, field

from .answers import Answer, Envelope
from .engine_work import EngineWork

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class WorkloadSpec:
    """A closed loop: `m` clients, each sending its next request when its last one has ended."""

    m: int
    """Number of requests in flight at any time."""
    num_requests: int
    """Number of measured requests; a multiple of `m` keeps every wave full."""
    input_len: int
    """Number of prompt tokens per request."""
    output_len: int
    """Number of output tokens per request, which is exact since the end-of-sequence token is ignored."""
    seed: int = 0
    """The seed of the prompts. Prompts of different seeds share no prefix, so a server cannot reuse
    anything."""
    vocab_size: int = 1024
    """Prompts are drawn from token ids below this, unless `token_pool` is given."""
    token_pool: tuple[int, ...] | None = field(default=None, repr=False)
    """Token ids of real text; prompts are then slices of it at different offsets."""
    temperature: float = 0.0
    sample_interval: float = 0.1
    """Seconds between two looks at `/metrics` for running and waiting; 0 for none."""
    request_timeout: float = 600.0
    """Seconds after which a request without an end counts as failed."""
    keep_answers: bool = False
    """Whether to keep the content of each stream, and to ask for token ids, so that the answers can be
    judged."""


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. Times are in seconds; `start` counts from the beginning of the
    measurement.
    """

    start: float
    ttft: float | None
    """Seconds from sending to the first chunk with a choice; of several choices, with the first."""
    itls: tuple[float, ...]
    """Seconds between chunks. A chunk may hold several tokens, so latency is judged by TPOT."""
    e2el: float
    """Seconds from sending to the end of the stream."""
    output_tokens: int
    """Number of output tokens according to the server's usage."""
    prompt_tokens: int
    error: str | None = None
    prompt: tuple[int, ...] = field(default=(), repr=False)
    """The prompt's token ids; empty unless answers are kept."""
    answer: Answer | None = field(default=None, repr=False)
    """The answer; None unless answers are kept."""
    other_choices: tuple[Answer, ...] = field(default=(), repr=False)
    """The answers after the first, if several were requested and answers are kept."""
    envelope: Envelope | None = field(default=None, repr=False)
    """What the answer says beside its text; None unless a load as in use asked for it."""
    total_tokens: int | None = None
    """The tokens of prompt and answer together, by the server's usage; None if it has no such field."""

    is_streamed: bool = True

    @property
    def decoding(self) -> tuple[float, float] | None:
        """Return when decoding began and ended, on the clock of `start`: at its first and its last chunk; the
        whole request if it was not streamed. None if nothing came."""
        if not self.is_streamed:
            return None if self.error is not None else (self.start, self.start + self.e2el)
        stamps = self.arrivals
        return (stamps[0], stamps[-1]) if stamps else None

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds until the client had a token; for an answer that was not streamed, until it had
        all tokens.
        """
        return self.ttft if self.is_streamed or self.error is not None else self.e2el

    @property
    def arrivals(self) -> list[float]:
        """Return when each chunk arrived, on the clock of `start`."""
        if self.ttft is None:
            return []
        return list(itertools.accumulate(self.itls, initial=self.start + self.ttft))

    @property
    def streamed_share(self) -> float | None:
        """Return the share of the time from sending to the end that comes after the first chunk, 0 to 1."""
        if self.error is not None or self.ttft is None or self.output_tokens < 2 or self.e2el <= 0:
            return None
        return (self.e2el - self.ttft) / self.e2el

    @property
    def tpot(self) -> float | None:
        """Return seconds per output token after the first: (E2EL − TTFT) / (output tokens − 1)."""
        if self.error is not None or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True)
class MetricsSample:
    """One look at `/metrics` while the workload ran; None if the server has no such series."""

    time: float
    """Seconds since the first measured request was sent."""
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None


@dataclass(frozen=True)
class WorkloadResult:
    """The results of one run of a workload."""

    spec: WorkloadSpec
    duration: float
    """Seconds from the first measured send to the last measured completion."""
    requests: tuple[RequestRecord, ...]
    samples: tuple[MetricsSample, ...]
    steps_by_running: dict[int, int] | None
    """How many decode steps ran with how many requests in them, counted by the server itself.

    None if the server does not say; only `samples` then tell what M was.
    """
    preemptions: int | None
    """Preemptions during the measurement; None if the server does not say."""
    engine: EngineWork = field(default_factory=EngineWork)
    """The server's further counts of its work during the measurement."""
    began: float = 0.0
    """When the clock of `RequestRecord.start` was zero, in seconds of `time.perf_counter`."""

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.requests if record.error is not None]

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.requests)

    @property
    def output_throughput(self) -> float:
        """Return output tokens per second: all tokens over `duration`, ramp-up and ramp-down of the batch
        included.

        Nothing is cut off at either end, so no choice of window can flatter the result.
        """
        return self.output_tokens / self.duration if self.duration > 0 else 0.0

    @property
    def running_mean(self) -> float | None:
        """Return the mean number of requests decoding together: by step if the server counts them, else by
        sample.
        """
        if self.steps_by_running:
            steps = sum(self.steps_by_running.values())
            return sum(running * count for running, count in self.steps_by_running.items()) / steps
        running = [sample.running for sample in self.samples if sample.running is not None]
        return sum(running) / len(running) if running else None

    @property
    def waiting_max(self) -> float | None:
        """Return the most requests that were seen queued. If the number stays above zero, M was not
        reached.
        """
        return max((sample.waiting for sample in self.samples if sample.waiting is not None), default=None)

    @property
    def ttfts(self) -> list[float]:
        return [record.ttft for record in self.requests if record.error is None and record.ttft is not None]

    @property
    def tpots(self) -> list[float]:
        return [tpot for record in self.requests if (tpot := record.tpot) is not None]

    @property
    def streamed_shares(self) -> list[float]:
        return [share for record in self.requests if (share := record.streamed_share) is not None]

    @property
    def itls(self) -> list[float]:
        return [itl for record in self.requests if record.error is None for itl in record.itls]

    @property
    def e2els(self) -> list[float]:
        return [record.e2el for record in self.requests if record.error is None]


def percentile(values: list[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, which is always one of the measured values; None if there are
    none.
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
