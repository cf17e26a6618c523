"""Whether the artifact's server keeps up under a load as in use: at every M, and while prompts are read.

The curve's loads are uniform. Here requests of all lengths arrive at any time, and M takes every value. So
slowness at some Ms shows even if none of them is on the curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from ...evidence.in_use import BlockInUse, SideInUse
from ...evidence.verdict import CheckResult
from ...settings import Bounds
from ...statistics.trimmed_mean import interval, student_t_quantile

NAME = "speed in use"
ERROR = 0.01
"""The chance that a throughput ratio of exactly the floor fails."""
FEWEST_REPEATED = 3
"""Blocks of the curve without which their scatter says nothing."""
TTFT_ALLOWANCE_S = 0.02
ITL_ALLOWANCE_S = 0.02
"""Added to both sides before dividing, as in `latency.py`: nobody notices 6 ms against 3."""
LEAST_GAPS = 60
"""Gaps between chunks that an M needs on either side. The standard error of a median is 1.25 standard
deviations over the root of their number: 16% of the gaps' own spread."""
LEAST_SLOW = 2
"""Ms at which chunks come too slowly, before one is believed: a burst of somebody else's work may meet one M
on one side."""
LEAST_SHARE_SLOW = 0.15
"""The same as a share of the Ms that are known."""


@dataclass(frozen=True)
class _Pair:
    """One block that both sides finished."""

    artifact: SideInUse
    baseline: SideInUse


def check_speed_in_use(
    blocks: Sequence[BlockInUse], bounds: Bounds, repeated: Sequence[float] = ()
) -> CheckResult:
    """Fail if throughput is surely below the floor, or a request's usual latency exceeds its bound.

    Latencies are compared request by request, and time between tokens at each M as well.

    repeated: log ratios of the curve's blocks at the largest M, which have about as many tokens: they show
    the scatter
    """
    bound = _in_words(bounds)
    pairs = [_Pair(block.artifact, block.baseline) for block in blocks if block.artifact and block.baseline]
    if not pairs:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no block of requests was finished")
    ratio, high = _throughput(pairs, repeated)
    tpot, ttft = _typical(pairs, "tpots", 0.0), _typical(pairs, "ttfts", TTFT_ALLOWANCE_S)
    itl = _itl_p99(pairs)
    by_m = _by_m(pairs)
    slow = {m: value for m, value in by_m.items() if value > bounds.max_tpot_ratio}
    problems = []
    if high < bounds.throughput_floor:
        problems.append(
            f"output throughput is {ratio:.2f}× the baseline's ({high:.2f}× at most), where requests of all "
            "lengths come at any time"
        )
    if len(slow) >= max(LEAST_SLOW, LEAST_SHARE_SLOW * len(by_m)):
        problems.append(
            f"at M={in_words(sorted(slow))} a token takes {median(slow.values()):.2f}× the baseline's time"
            + ("" if len(slow) == len(by_m) else f", at the other {len(by_m) - len(slow)} Ms it does not")
        )
    elif tpot is not None and tpot > bounds.max_tpot_ratio:
        problems.append(f"a request's TPOT is {tpot:.2f}× the baseline's")
    if ttft is not None and ttft > bounds.max_ttft_ratio:
        problems.append(f"a request's first token takes {ttft:.2f}× the baseline's time")
    if itl is not None and itl > bounds.max_itl_ratio:
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


def _in_words(bounds: Bounds) -> str:
    return (
        f"the baseline's throughput ×{bounds.throughput_floor:g} at least, its TPOT "
        f"×{bounds.max_tpot_ratio:g} at each M, TTFT ×{bounds.max_ttft_ratio:g} and 99th percentile of ITL "
        f"×{bounds.max_itl_ratio:g} at most"
    )


def _throughput(pairs: Sequence[_Pair], repeated: Sequence[float]) -> tuple[float, float]:
    """Artifact over baseline, and the upper limit of it; infinite from a single block.

    The variance of three blocks has two degrees of freedom, and that of the curve's blocks has several more,
    so both are pooled; if the three blocks scatter more, only their own variance is used. With noise of 7%
    per block, six blocks of the curve and a floor of 0.93, a ratio of 0.8 then fails in 65% of runs instead
    of 25%. A ratio equal to the floor fails in 0.8%, or in 3% if blocks in use scatter twice as much as those
    of the curve.
    """
    logs = [
        math.log(pair.artifact.output_throughput / pair.baseline.output_throughput)
        for pair in pairs
        if pair.artifact.output_throughput > 0 and pair.baseline.output_throughput > 0
    ]
    if not logs:
        return math.nan, math.inf
    mean = fmean(logs)
    high = interval(logs, ERROR, ERROR)[1]
    if len(logs) > 1 and len(repeated) >= FEWEST_REPEATED:
        freedom = len(logs) + len(repeated) - 2
        own, theirs = variance(logs), variance(repeated)
        pooled = ((len(logs) - 1) * own + (len(repeated) - 1) * theirs) / freedom
        width = student_t_quantile(ERROR, freedom) * math.sqrt(max(own, pooled) / len(logs))
        high = min(high, mean + width)
    return math.exp(mean), math.exp(high) if math.isfinite(high) else math.inf


def _typical(pairs: Sequence[_Pair], figure: str, allowance: float) -> float | None:
    """The median over requests of artifact over baseline; None if no request has both."""
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
    """The ratio of the time between tokens at each M that either side had long enough."""
    ours, theirs = (_medians([getattr(pair, side) for pair in pairs]) for side in ("artifact", "baseline"))
    return {m: ours[m] / theirs[m] for m in sorted(ours.keys() & theirs.keys()) if theirs[m] > 0}


def _medians(sides: Sequence[SideInUse]) -> dict[int, float]:
    """Seconds between tokens by M, the mean of the blocks' medians, if there are enough gaps."""
    found = {}
    for m in {m for side in sides for m in side.itls_by_m}:
        known = [side.itls_by_m[m] for side in sides if m in side.itls_by_m]
        count = sum(count for count, _ in known)
        if count >= LEAST_GAPS:
            found[m] = math.fsum(count * seconds for count, seconds in known) / count
    return found


def in_words(ms: Sequence[int]) -> str:
    """`3, 5–7, 9`: neighbours together."""
    groups: list[list[int]] = []
    for m in ms:
        if groups and m == groups[-1][-1] + 1:
            groups[-1].append(m)
        else:
            groups.append([m])
    return ", ".join(f"{group[0]}–{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups)


def _words(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.2f}×"
