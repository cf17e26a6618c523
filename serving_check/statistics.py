"""Decides from interleaved repeats whether a throughput ratio is above a floor, below it, or not yet known.

Pure arithmetic on numbers already measured: not for running workloads, and not for any other check.

One *block* is four repeats close together in time, artifact-baseline-baseline-artifact (or its mirror image),
and gives one log ratio, from which a linear drift of the machine cancels. Student's t on the blocks gives an
interval. With eight blocks or more the extremes are trimmed (Tukey and McLaughlin, 1963): one burst of
somebody else's work must not widen it for good. The two errors are guarded separately:

- wrongly failing: a fail at any one M fails the artifact, so each M gets its share (Bonferroni over the Ms);
- wrongly passing: every M has to pass, so the worst M alone bounds the chance (an intersection-union test,
  Berger 1982).

Both are divided again by the number of looks, so that stopping as soon as it is decided stays honest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Status = Literal["pass", "fail", "inconclusive"]

FIRST_LOOK = 3
"""Blocks before the first decision: the fewest from which a spread can be told with any use."""
FIRST_FAIL = 6
"""Blocks before the first fail: three bursts on one side alone can pass for a slow model, six hardly."""
LOOK_GROWTH = 4 / 3
"""Blocks at one look over those at the look before: more looks would cost more than they save."""
BLOCKS_PER_TRIM = 8
"""One block is trimmed from each end for every so many."""


@dataclass(frozen=True)
class SequentialTest:
    """What is fixed before the first repeat, so that no result can bend it."""

    floor: float
    """The ratio, artifact over baseline, that must be reached."""
    number_of_ms: int
    max_blocks: int = 24
    error: float = 0.05
    """The chance of a wrong verdict, of either kind, at a true ratio of exactly the floor; less elsewhere."""

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many blocks a decision is attempted; the last is `max_blocks`."""
        looks = [min(FIRST_LOOK, self.max_blocks)]
        while looks[-1] < self.max_blocks:
            looks.append(min(self.max_blocks, max(looks[-1] + 1, math.ceil(looks[-1] * LOOK_GROWTH))))
        return tuple(looks)

    @property
    def pass_error(self) -> float:
        """One-sided level of the lower limit at one look."""
        return self.error / len(self.looks)

    @property
    def fail_error(self) -> float:
        """One-sided level of the upper limit at one of the looks that can fail."""
        failing = sum(blocks >= self.first_fail for blocks in self.looks)
        return self.error / failing / self.number_of_ms

    @property
    def first_fail(self) -> int:
        return min(FIRST_FAIL, self.max_blocks)


@dataclass(frozen=True)
class Decision:
    """Where one M stands. `low` and `high` are the limits the decision was made with, corrected as above."""

    status: Status
    ratio: float
    low: float
    high: float
    blocks: int
    final: bool
    """No further block would be looked at: decided, or out of blocks."""


def block_log_ratio(artifact: Sequence[float], baseline: Sequence[float]) -> float:
    """One block's log ratio of geometric means, from its repeats' throughputs on either side."""
    return _mean([math.log(value) for value in artifact]) - _mean([math.log(value) for value in baseline])


def block_order(index: int) -> str:
    """The order of the repeats in block `index`: `A` the artifact, `B` the baseline."""
    return "ABBA" if index % 2 == 0 else "BAAB"


def decide(log_ratios: Sequence[float], test: SequentialTest) -> Decision:
    """The decision after these blocks of one M, oldest first.

    It is replayed from the first look, so it depends on the blocks alone, and a decision once reached stands.
    """
    for blocks in test.looks:
        if blocks > len(log_ratios):
            break
        decision = _look(log_ratios[:blocks], test)
        if decision.final:
            return decision
    return _estimate(log_ratios, test, "inconclusive", final=False)


def _look(log_ratios: Sequence[float], test: SequentialTest) -> Decision:
    low, high = interval(log_ratios, test.pass_error, test.fail_error)
    status: Status = "inconclusive"
    if low >= math.log(test.floor):
        status = "pass"
    elif high < math.log(test.floor) and len(log_ratios) >= test.first_fail:
        status = "fail"
    final = status != "inconclusive" or len(log_ratios) >= test.max_blocks
    return _estimate(log_ratios, test, status, final)


def _estimate(log_ratios: Sequence[float], test: SequentialTest, status: Status, final: bool) -> Decision:
    low, high = interval(log_ratios, test.pass_error, test.fail_error)
    centre, _, _ = _trimmed(log_ratios) if log_ratios else (math.nan, math.nan, 0)
    return Decision(status, math.exp(centre), math.exp(low), math.exp(high), len(log_ratios), final)


def interval(values: Sequence[float], low_error: float, high_error: float) -> tuple[float, float]:
    """Confidence limits for the centre of `values`, one-sided levels each; infinite below two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    centre, standard_error, freedom = _trimmed(values)
    return (
        centre - student_t_quantile(low_error, freedom) * standard_error,
        centre + student_t_quantile(high_error, freedom) * standard_error,
    )


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """Trimmed mean, its standard error from the winsorized values, and the degrees of freedom."""
    ordered = sorted(values)
    trim = len(ordered) // BLOCKS_PER_TRIM
    kept = ordered[trim : len(ordered) - trim]
    centre = _mean(kept)
    if len(kept) < 2:
        return centre, math.inf, 1
    winsorized = [kept[0]] * trim + kept + [kept[-1]] * trim
    mean = _mean(winsorized)
    squares = math.fsum((value - mean) ** 2 for value in winsorized)
    return centre, math.sqrt(squares / (len(kept) * (len(kept) - 1))), len(kept) - 1


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@lru_cache
def student_t_quantile(upper_tail: float, freedom: int) -> float:
    """The t that a Student variable exceeds with probability `upper_tail`, which is below one half."""
    low, high = 0.0, 1.0
    while _student_t_tail(high, freedom) > upper_tail:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _student_t_tail(middle, freedom) > upper_tail:
            low = middle
        else:
            high = middle
    return high


def _student_t_tail(t: float, freedom: int) -> float:
    """P(T > t) for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine_squared = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom, 2):
        term *= cosine_squared * (step - 1) / step
        total += term
    central = math.sin(angle) * total
    if odd:
        central = 2 / math.pi * (angle + central)
    return (1 - central) / 2
