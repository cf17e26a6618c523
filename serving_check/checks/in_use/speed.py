"""Whether the artifact's server keeps up under a load as in use: at every M, and while prompts are read.

The curve's loads are uniform. In the load as in use, requests of all lengths arrive at any time, and M takes
every value. A server that is slow at some Ms therefore shows it under the load as in use, even if none of
these Ms is on the curve.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from ...evidence.in_use import BlockInUse, SideInUse
from ...evidence.measurement import MeasuredM, output_throughput
from ...evidence.verdict import CheckResult
from ...settings import Bounds
from ...statistics.correlation import autoregression
from ...statistics.decide import correlation_of
from ...statistics.trimmed_mean import interval, student_t_quantile
from .speed_by_group import slow_groups

NAME = "speed in use"
ERROR = 0.01
"""The chance that a throughput ratio of exactly the floor fails."""
LATENCY_ERROR = 0.05
"""The chance that a latency of exactly its bound fails. Sound servers are far from the bounds and fail less
often: `tests/bench/results/gate/operating_characteristic.json` says how often."""
FEWEST_REPEATED = 3
"""The least number of the curve's blocks from which a scatter is computed."""
TTFT_ALLOWANCE_S = 0.02
ITL_ALLOWANCE_S = 0.02
"""Seconds that are added to both sides before dividing, as in `latency.py`: nobody notices 6 ms against 3."""
LEAST_GAPS = 60
"""The least number of gaps between chunks that an M needs on either side. The standard error of a median is
1.25 standard deviations over the root of that number: 16% of the gaps' own spread."""
LEAST_SLOW = 2
"""The least number of slow Ms for a fail: a burst of other work on the machine may slow one M on one side."""
LEAST_SHARE_SLOW = 0.15
"""The least share of slow Ms for a fail, among the Ms with enough gaps."""
LEAST_BLOCKS_SLOW = 2
"""The least number of blocks in which an M must be slow: a block has few gaps at one M, and other work may
run at the same time."""


@dataclass(frozen=True)
class Scatter:
    """How blocks of the curve scatter, which have about as many tokens as blocks of the load as in use."""

    repeated: tuple[float, ...] = ()
    """The log ratios of the curve's blocks at the largest M."""
    correlation: float = 0.0
    """The estimated correlation between neighbouring blocks."""


def scatter_of(measured: Sequence[MeasuredM]) -> Scatter:
    """Return the scatter of the curve's blocks."""
    by_m = [level.log_ratios(output_throughput) for level in sorted(measured, key=lambda level: level.m)]
    return Scatter(tuple(by_m[-1]), correlation_of(by_m, caution=0.0)) if by_m else Scatter()


@dataclass(frozen=True)
class _Pair:
    """One block that both sides finished."""

    artifact: SideInUse
    baseline: SideInUse


def check_speed_in_use(
    blocks: Sequence[BlockInUse], bounds: Bounds, scatter: Scatter = Scatter()
) -> CheckResult:
    """Fail if throughput is surely below the floor, or a request's usual latency surely exceeds its bound.

    Latencies are compared request by request, over all requests and over groups, and the time between tokens
    at each M. Only blocks are independent of one another, so a latency must exceed its bound by as much as
    blocks scatter.
    """
    bound = _in_words(bounds)
    pairs = [_Pair(block.artifact, block.baseline) for block in blocks if block.artifact and block.baseline]
    if not pairs:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no block of requests was finished")
    ratio, high = _throughput(pairs, scatter)
    tpot, ttft, itl = _typical_tpot(pairs), _typical_ttft(pairs), _itl_p99(pairs)
    by_m = _by_m(pairs)
    tpot_margin, ttft_margin, itl_margin = (
        math.exp(_margin(_of_blocks(pairs, figure), scatter, LATENCY_ERROR))
        for figure in (_typical_tpot, _typical_ttft, _itl_p99)
    )
    slow = _slow_ms(pairs, by_m, bounds.max_tpot_ratio, tpot_margin)
    problems, latency_problems = [], []
    if high < bounds.throughput_floor:
        problems.append(
            f"output throughput is {ratio:.2f}× the baseline's ({high:.2f}× at most), where requests of all "
            "lengths come at any time"
        )
    if len(slow) >= max(LEAST_SLOW, LEAST_SHARE_SLOW * len(by_m)):
        latency_problems.append(_at_slow_ms(slow, len(by_m) - len(slow)))
    elif tpot is not None and tpot > bounds.max_tpot_ratio * tpot_margin:
        latency_problems.append(f"a request's TPOT is {tpot:.2f}× the baseline's")
    if ttft is not None and ttft > bounds.max_ttft_ratio * ttft_margin:
        latency_problems.append(f"a request's first token takes {ttft:.2f}× the baseline's time")
    problems += latency_problems or _slow_groups(blocks, bounds, tpot_margin, ttft_margin)
    if itl is not None and itl > bounds.max_itl_ratio * itl_margin:
        problems.append(
            f"the 99th percentile of the time between tokens is {itl:.2f}× the baseline's: streams wait "
            "while prompts are read, or when requests come or go"
        )
    answered = sum(len(pair.artifact.ttfts) for pair in pairs)
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"throughput {ratio:.2f}×, TPOT {_words(tpot)}, TTFT {_words(ttft)}, ITL {_words(itl)}",
        bound=bound,
        reason="; ".join(problems)
        or f"{answered} requests of all lengths, at {len(by_m)} values of M up to {max(by_m, default=0)}, "
        "were answered as fast as by the baseline",
        figures={
            "throughput_ratio": ratio,
            "throughput_ratio_high": high if math.isfinite(high) else None,
            "tpot_ratio": tpot,
            "ttft_ratio": ttft,
            "itl_p99_ratio": itl,
            "ms": len(by_m),
            "slow_ms": len(slow),
        },
    )


def _at_slow_ms(slow: Mapping[int, float], others: int) -> str:
    said = f"at M={in_words(sorted(slow))} a token takes {median(slow.values()):.2f}× the baseline's time"
    return said + (f", at the other {others} Ms it does not" if others else "")


def _in_words(bounds: Bounds) -> str:
    return (
        f"the baseline's throughput ×{bounds.throughput_floor:g} at least, its TPOT "
        f"×{bounds.max_tpot_ratio:g} at each M, TTFT ×{bounds.max_ttft_ratio:g} and 99th percentile of ITL "
        f"×{bounds.max_itl_ratio:g} at most"
    )


def _slow_groups(
    blocks: Sequence[BlockInUse], bounds: Bounds, tpot_margin: float, ttft_margin: float
) -> list[str]:
    tpots = slow_groups(blocks, "tpots", 0.0, bounds.max_tpot_ratio * tpot_margin)
    ttfts = slow_groups(blocks, "ttfts", TTFT_ALLOWANCE_S, bounds.max_ttft_ratio * ttft_margin)
    return [f"the TPOT of {group.name} is {group.ratio:.2f}× the baseline's" for group in tpots] + [
        f"the first token of {group.name} takes {group.ratio:.2f}× the baseline's time" for group in ttfts
    ]


def _throughput(pairs: Sequence[_Pair], scatter: Scatter) -> tuple[float, float]:
    """Return the throughput ratio, artifact over baseline, and its upper limit, which is infinite for a
    single block."""
    logs = [
        math.log(pair.artifact.output_throughput / pair.baseline.output_throughput)
        for pair in pairs
        if pair.artifact.output_throughput > 0 and pair.baseline.output_throughput > 0
    ]
    if not logs:
        return math.nan, math.inf
    mean, margin = fmean(logs), _margin(logs, scatter, ERROR)
    return math.exp(mean), math.exp(mean + margin) if math.isfinite(margin) else math.inf


def _margin(logs: Sequence[float], scatter: Scatter, error: float) -> float:
    """Return by how much the mean of blocks' log ratios may be too small, or too large, with chance `error`;
    infinite for a single block.

    The variance of three blocks has two degrees of freedom, that of the curve's blocks several more, so both
    are pooled; the margin is never taken from less than the three blocks have themselves.
    """
    count, rho, repeated = len(logs), scatter.correlation, scatter.repeated
    if count < 2:
        return math.inf
    margin = interval(logs, error, error, rho)[1] - fmean(logs)
    if len(repeated) < FEWEST_REPEATED:
        return margin
    own, theirs = autoregression(count, rho), autoregression(len(repeated), rho)
    own_variance = variance(logs) * own.of_variance
    squares = own.freedom * own_variance + theirs.freedom * variance(repeated) * theirs.of_variance
    freedom = own.freedom + theirs.freedom
    quantile = student_t_quantile(error, max(1, round(freedom)))
    return min(margin, quantile * math.sqrt(max(own_variance, squares / freedom) * own.of_mean / count))


def _of_blocks(pairs: Sequence[_Pair], figure: Callable[[Sequence[_Pair]], float | None]) -> list[float]:
    """Return the log ratio of `figure` in each block that has it on both sides."""
    ratios = [figure([pair]) for pair in pairs]
    return [math.log(ratio) for ratio in ratios if ratio]


def _typical_tpot(pairs: Sequence[_Pair]) -> float | None:
    return _typical(pairs, "tpots", 0.0)


def _typical_ttft(pairs: Sequence[_Pair]) -> float | None:
    return _typical(pairs, "ttfts", TTFT_ALLOWANCE_S)


def _typical(pairs: Sequence[_Pair], figure: str, allowance: float) -> float | None:
    """Return the median over requests of the ratio, artifact over baseline; None if no request has the figure
    on both sides."""
    ratios = [
        (ours + allowance) / (theirs + allowance)
        for pair in pairs
        for ours, theirs in zip(getattr(pair.artifact, figure), getattr(pair.baseline, figure), strict=True)
        if ours is not None and theirs
    ]
    return median(ratios) if ratios else None


def _itl_p99(pairs: Sequence[_Pair]) -> float | None:
    ratios = [
        (pair.artifact.itl_p99 + ITL_ALLOWANCE_S) / (pair.baseline.itl_p99 + ITL_ALLOWANCE_S)
        for pair in pairs
        if pair.artifact.itl_p99 is not None and pair.baseline.itl_p99 is not None
    ]
    return median(ratios) if ratios else None


def _by_m(pairs: Sequence[_Pair]) -> dict[int, float]:
    """Return the ratio of the time between tokens at each M that either side had long enough."""
    ours, theirs = (_medians([getattr(pair, side) for pair in pairs]) for side in ("artifact", "baseline"))
    return {m: ours[m] / theirs[m] for m in sorted(ours.keys() & theirs.keys()) if theirs[m] > 0}


def _slow_ms(
    pairs: Sequence[_Pair], by_m: Mapping[int, float], most: float, margin: float
) -> dict[int, float]:
    """Return the Ms at which the ratio is above `most` by the margin, and above it in several blocks.

    The margin is that of blocks, or a larger one: as much as ratios at one M scatter over blocks. Few gaps
    are at one M, so the variance is pooled over all Ms. Without that pooling, one in twenty sound servers
    failed in simulated runs with 20% noise.
    """
    logs = {m: found for m in by_m if len(found := _logs_at(pairs, m)) >= LEAST_BLOCKS_SLOW}
    freedom = sum(len(values) - 1 for values in logs.values())
    if not freedom:
        return {}
    pooled = math.fsum((len(values) - 1) * variance(values) for values in logs.values()) / freedom
    width = student_t_quantile(LATENCY_ERROR, freedom) * math.sqrt(pooled)
    return {
        m: by_m[m]
        for m, values in logs.items()
        if by_m[m] > most * max(margin, math.exp(width / math.sqrt(len(values))))
        and sum(value > math.log(most) for value in values) >= LEAST_BLOCKS_SLOW
    }


def _logs_at(pairs: Sequence[_Pair], m: int) -> list[float]:
    """Return the log ratio of the time between tokens at M, of each block in which both sides were there."""
    both = [(pair.artifact.itls_by_m.get(m), pair.baseline.itls_by_m.get(m)) for pair in pairs]
    return [
        math.log(ours[1] / theirs[1]) for ours, theirs in both if ours and theirs and ours[1] and theirs[1]
    ]


def _medians(sides: Sequence[SideInUse]) -> dict[int, float]:
    """Return the seconds between tokens by M, the mean of the blocks' medians, if there are enough gaps."""
    found = {}
    for m in {m for side in sides for m in side.itls_by_m}:
        known = [side.itls_by_m[m] for side in sides if m in side.itls_by_m]
        count = sum(count for count, _ in known)
        if count >= LEAST_GAPS:
            found[m] = math.fsum(count * seconds for count, seconds in known) / count
    return found


def in_words(ms: Sequence[int]) -> str:
    """Write Ms as text, with neighbours joined to ranges: `3, 5–7, 9`."""
    groups: list[list[int]] = []
    for m in ms:
        if groups and m == groups[-1][-1] + 1:
            groups[-1].append(m)
        else:
            groups.append([m])
    return ", ".join(f"{group[0]}–{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups)


def _words(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.2f}×"
