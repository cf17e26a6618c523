"""Examines a server before and after a load: whether it still holds memory or pages, and whether it became
slower.

A burst of tiny requests shows faults that grow with the number of requests. After the burst, the smallest M
is measured once more. `checks/in_use/at_rest.py` and `checks/in_use/drift.py` judge.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..adapters import Endpoint
from ..adapters.prometheus_text import total
from ..checks.in_use.at_rest import shows_growth
from ..checks.in_use.drift import check_drift, shows_step
from ..evidence.at_rest import PARTS_BEFORE, AtRestFigures, BurstPart, Rest
from ..evidence.measurement import MeasuredM, Repeat
from ..settings import WorkloadSettings
from ..statistics.decide import LOOKS, block_order
from ..workload.burst import PROMPT_TOKENS, WHOLE, leave_long_answers, send_burst
from ..workload.planned_request import Kind
from .interleaving import SEEDS_PER_M, SEEDS_PER_RUN, workload_spec
from .repeats import Repeats

PATIENCE_S = 3.0
"""Seconds that a server may take to end requests whose clients have left, and to show this in `/metrics`."""
LEAST_PATIENCE_S = 0.5
"""The same, at least, if the answers whose clients have left would end soon by themselves."""
ENDING_SHARE = 0.5
"""The share of the time in which those answers would end by themselves, within which they must end because
their clients have left."""
POLL_S = 0.05
SETTLES_S = 0.2
"""Seconds until a server's counters include the latest requests: ours updates them every 0.05 s."""
PARTS = 8
"""Number of parts of a burst: enough to tell a step from noise, and a leak from a heap that fills once."""
CONFIRMING_PARTS = 4
"""Number of further parts after what looks like a step or a leak: a step caused by the machine would not
last, and a heap is full at some time."""
PART_S = 1.2
"""The most seconds that a part of the burst takes, if the server does not become slower."""
MOST_IN_A_PART = 240
"""The most requests in a part: enough for a step by half to stand out of noise, and for memory that grows by
little more than a KiB with every request to stand out of a heap's steps."""
FIRST_REQUESTS = 200
"""Number of requests before the burst's parts: they show the rate, and fill pools that later requests
reuse."""
SEEN_REQUESTS = 3000
"""Number of requests before the last parts of a burst. If the first parts have fewer, further requests are
sent between the parts, many in each HTTP request, which a server handles several times as fast."""
PROMPTS_EACH = 32
BETWEEN_S = 8.0
"""The most seconds for the requests that are sent between the parts."""
FIRST_S = 0.75
"""The planned seconds for the first requests, which may take twice as long."""
BASELINE_SHARE = 0.25
"""The baseline's requests in a part, as a share of the artifact's: they only show whether the machine
slows."""
LEAST_LAST, MOST_LAST = LOOKS[0], 6 * LOOKS[0]
"""The least and the most repeats of each side at the end: more than the least only if `drift` is
inconclusive."""
LAST_S = 12.0
"""Seconds after which no further repeat is sent at the end, once there are two."""
FIRST_SEED = SEEDS_PER_M * 3 // 4
"""The first seed of the last repeats. The seeds of blocks begin at 0, of blocks on both servers at once in
the middle, of warm-ups at the end."""
LEFT_AT_END = 2
"""Number of requests whose clients leave at the end."""
MOST_LEFT_TOKENS = 16384
KEPT_ERRORS = 20


@dataclass(frozen=True)
class Sides:
    """The servers to examine, and the requests for them."""

    artifact: Endpoint
    baseline: Endpoint | None
    """The baseline's server; None if the servers take turns, when only the artifact's is running."""
    workload: WorkloadSettings
    text: Sequence[int]
    repeat: Repeats
    kinds: Collection[Kind] = (WHOLE,)
    """The kinds of requests that the servers accept."""
    context: int = 0
    """The most tokens that a request may have."""


def look_before(endpoint: Endpoint) -> Rest:
    """Return the figures of `endpoint` at rest, before a load."""
    return _at_rest(endpoint, PATIENCE_S + endpoint.metrics_renewal_s)


def look_after(sides: Sides, measured: Sequence[MeasuredM], before: Rest, requests: int) -> AtRestFigures:
    """Send a burst and the smallest M again, then look at the artifact's server at rest.

    measured: the blocks; the last repeats are compared with the first ones at the smallest M before: from
              `look_before`
    requests: that the artifact's server was sent since then
    """
    artifact, baseline = sides.artifact, sides.baseline
    for endpoint in (artifact, baseline):
        if endpoint is not None:
            _at_rest(endpoint, PATIENCE_S)
    burst = _Burst(sides)
    burst.send()
    first = min(measured, key=lambda level: level.m)
    figures = AtRestFigures(
        requests=requests + burst.requests,
        before=before,
        after=before,
        burst=tuple(burst.parts),
        first_m=first.m,
        first=_throughputs(first.artifact[:MOST_LAST]),
        last=(),
        baseline_burst=tuple(burst.baseline_parts),
        baseline_first=() if baseline is None else _throughputs(first.baseline[:MOST_LAST]),
        between=burst.between,
        errors=tuple(burst.errors[:KEPT_ERRORS]),
    )
    figures = _measure_again(sides, figures)
    patience = PATIENCE_S
    if sides.context > PROMPT_TOKENS:
        tokens = min(MOST_LEFT_TOKENS, sides.context - PROMPT_TOKENS)
        leave_long_answers(artifact, sides.text, LEFT_AT_END, tokens)
        patience = _patience(first.artifact, tokens)
        figures = replace(figures, requests=figures.requests + LEFT_AT_END)
        # What was counted while they ran may be told once more.
        time.sleep(SETTLES_S)
    patience += artifact.metrics_renewal_s
    return replace(figures, after=_at_rest(artifact, patience, before.kv_cache_usage))


def _patience(repeats: Sequence[Repeat], tokens: int) -> float:
    """Return the seconds within which answers of `tokens` tokens must end after their clients have left,
    fewer than the answers would take.

    repeats: of the smallest M, where tokens come fastest
    """
    tpots = [tpot for repeat in repeats for tpot in repeat.tpots]
    ends = tokens * min(tpots, default=PATIENCE_S)
    return min(PATIENCE_S, max(LEAST_PATIENCE_S, ENDING_SHARE * ends))


class _Burst:
    """Send parts of a burst, at both servers in turn."""

    def __init__(self, sides: Sides):
        self._sides = sides
        self._seed = sides.workload.seed * SEEDS_PER_RUN
        self.parts: list[BurstPart] = []
        self.baseline_parts: list[BurstPart] = []
        self.between = 0
        self.requests = 0
        """Number of requests that the artifact's server was sent."""
        self.errors: list[str] = []
        """The errors of the artifact's server."""

    def send(self) -> None:
        artifact, baseline = self._sides.artifact, self._sides.baseline
        rate = self._rate(artifact, FIRST_REQUESTS)
        size = max(1, min(MOST_IN_A_PART, round(rate * PART_S)))
        seconds = size / rate
        baseline_s = BASELINE_SHARE * seconds
        baseline_size = 0
        if baseline is not None:
            baseline_rate = self._rate(baseline, round(BASELINE_SHARE * FIRST_REQUESTS))
            baseline_size = max(1, round(baseline_rate * baseline_s))
        while not self.errors and self._needs_another():
            if len(self.parts) == PARTS_BEFORE:
                self._send_between(SEEN_REQUESTS - self.requests)
            self.parts.append(self._part(artifact, size, seconds))
            if baseline is not None:
                self.baseline_parts.append(self._part(baseline, baseline_size, baseline_s))

    def _send_between(self, requests: int) -> None:
        """Send requests with many prompts each, unless a server accepts only one prompt per request."""
        artifact, text = self._sides.artifact, self._sides.text
        if requests < PROMPTS_EACH:
            return
        for wanted in (PROMPTS_EACH, requests):
            self._seed += 1
            result = send_burst(artifact, text, self._seed, wanted, BETWEEN_S, prompts_each=PROMPTS_EACH)
            if result.errors:
                return
            self.between += result.requests
            self.requests += result.requests

    def _needs_another(self) -> bool:
        sent = len(self.parts)
        suspicious = shows_step(self.parts, self.baseline_parts) or shows_growth(self.parts)
        return sent < PARTS or (sent < PARTS + CONFIRMING_PARTS and suspicious)

    def _rate(self, endpoint: Endpoint, requests: int) -> float:
        """Return the server's requests per second, measured with the first requests of a burst."""
        first = self._part(endpoint, requests, FIRST_S)
        return max(first.requests, 1) / max(first.seconds, 1e-9)

    def _part(self, endpoint: Endpoint, requests: int, seconds: float) -> BurstPart:
        """Send a part of the burst, which is cut short if it takes more than twice as long as expected."""
        self._seed += 1
        kinds = self._sides.kinds
        result = send_burst(endpoint, self._sides.text, self._seed, requests, 2 * seconds, kinds)
        memory = None
        if endpoint is self._sides.artifact:
            self.requests += result.requests
            self.errors += result.errors
            memory = endpoint.memory_bytes(endpoint.metrics())
        return BurstPart(result.requests, result.seconds, memory)


def _measure_again(sides: Sides, figures: AtRestFigures) -> AtRestFigures:
    """Return `figures` with the last repeats at the first M, of both servers in alternate order."""
    began = time.monotonic()
    for index in range(MOST_LAST):
        in_time = time.monotonic() - began < LAST_S or index < 2
        if not in_time or (index >= LEAST_LAST and check_drift(figures).status != "inconclusive"):
            break
        spec = workload_spec(sides.workload, figures.first_m, sides.text, FIRST_SEED + index)
        for side in block_order(index):
            endpoint = sides.artifact if side == "A" else sides.baseline
            if endpoint is None:
                continue
            repeat = sides.repeat(endpoint, spec)
            if side == "B":
                figures = replace(figures, baseline_last=(*figures.baseline_last, *_throughputs([repeat])))
                continue
            figures = replace(
                figures,
                requests=figures.requests + repeat.requests,
                last=(*figures.last, *_throughputs([repeat])),
                errors=(*figures.errors, *repeat.errors)[:KEPT_ERRORS],
            )
        if figures.errors:
            break
    return figures


def _throughputs(repeats: Sequence[Repeat]) -> tuple[float, ...]:
    """Return output tokens per second of each repeat without a failed request."""
    return tuple(repeat.output_throughput for repeat in repeats if not repeat.errors)


def _at_rest(endpoint: Endpoint, patience: float, kv_cache_usage: float | None = None) -> Rest:
    """Return the server's figures once it is at rest, or after a time limit.

    kv_cache_usage: the usage allowed at rest; None if that is not known
    """
    deadline = time.monotonic() + patience
    while True:
        said, series = endpoint.metrics(), endpoint.series
        rest = Rest(
            running=total(said, series.running),
            waiting=total(said, series.waiting),
            kv_cache_usage=total(said, series.kv_cache_usage),
            memory_bytes=endpoint.memory_bytes(said),
        )
        holds_more = kv_cache_usage is not None and (rest.kv_cache_usage or 0.0) > kv_cache_usage
        if time.monotonic() >= deadline or not (rest.running or rest.waiting or holds_more):
            return rest
        time.sleep(POLL_S)
