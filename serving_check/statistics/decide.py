"""Decides from interleaved repeats whether a throughput ratio is above a floor, below it, or not yet known.

The module is pure arithmetic on numbers already measured: workloads are run, and other checks are made,
elsewhere.

One *block* is a repeat of the artifact and one of the baseline close together in time, in alternating order
(ABBA). A block gives one log ratio: a slow machine slows both repeats, and a linear drift cancels over two
blocks. The ratio is a trimmed mean of the blocks (Tukey and McLaughlin, 1963), so that a burst of other work
moves it little (`trimmed_mean.py`); its limits get wider with the correlation between blocks.

The two errors are guarded separately:

- A wrong fail: a fail at any one M fails the artifact, so the chance is divided among the Ms (Bonferroni);
- A wrong pass: every M has to pass, so the worst M alone bounds the chance (an intersection-union test,
Berger 1982).

The chance of each error is divided among the looks at the figures: most of it goes to the first looks, since
every verdict has them, and to the last one. This needs no assumption on how looks depend on each other, so
measuring may stop as soon as an M is decided. The resulting error rates are in
`tests/bench/results/gate/operating_characteristic.json`.

If servers take turns, a group of blocks counts as one value, and a server is restarted for every group. After
a restart, only effects of the machine remain. Effects on both sides alike do not correlate groups: even in a
random walk, each group has its own steps. Effects on one side alone are at most a random walk from the
machine's first state, and the ratio is for that state. Limits are therefore never wider than those of such a
walk, however strong the correlation that a few groups cannot exclude.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from .correlation import CAUTION, upper_correlation
from .trimmed_mean import interval, trimmed, winsorized

Status = Literal["pass", "fail", "inconclusive"]

LOOKS = (6, 7, 8, 9, 11, 13, 16, 20, 27, 36, 48, 64, 96)
"""After how many blocks a decision is attempted: fewer than six tell little of correlation, and more looks
would cost more than they save."""
LAST_SHARE = 0.3
"""The share of the error that is kept for the last look."""
SPENT_AT_A_LOOK = 0.2
"""How much of the rest each look before the last spends, as a share of what earlier looks have left. Early
limits have few degrees of freedom and gain most from it."""
WIDEST = 1.5
"""The 95% interval's upper limit over its lower one, beyond which a ratio is not known well enough to be
published. Limits that a decision is made with are wider, being corrected for looks and Ms: they guard against
errors, and say less of how well the ratio is known."""
WIDEST_IF_FASTER = WIDEST**2
"""The same if all of the interval is above 1: the artifact is faster then, by a factor that matters less."""
SHOWN_ERROR = 0.025
"""The error probability on either side of a 95% interval."""
RESTART_FROM = 27
"""Blocks from which on servers may be started anew, where correlation is what keeps the decision."""
STRONG = 0.5
"""A correlation between blocks from which on more of them, on the same servers, hardly help."""
GROUP = 6
"""Number of blocks on the same servers after a restart; the mean of such a group counts as one value."""
LEAST_FOR_GROUPS = RESTART_FROM + LOOKS[0] * GROUP
"""The least `max_blocks` with which servers are restarted: the groups must suffice for the first look."""
GROUPED_ERROR = 0.01
"""The chance of a wrong verdict from groups of blocks, beside that from single blocks."""
TURN_LOOKS = (4, 6, 8, 12, 16)
"""After how many groups a decision is attempted where servers take turns: even numbers, over which a drift of
the machine cancels, since the sides change their order from group to group."""
TURN_ERROR = 0.03
"""The error that is spent on these looks, half of the remainder at each: early limits have two degrees of
freedom and gain most from it. The resulting errors are in
`tests/bench/results/gate/turns_characteristic.json`."""
MOST_LOG = 700.0
"""The largest logarithm whose number is not treated as infinite."""
HOPELESS = 0.5
"""A ratio below this share of the floor in the first two looks needs no statistics."""


@dataclass(frozen=True)
class SequentialTest:
    """The parameters that are fixed before the first repeat, so that no result can change them."""

    floor: float
    """The ratio, artifact over baseline, that must be reached."""
    number_of_ms: int
    """The number of Ms; an M counts once for each of its figures that is decided."""
    max_blocks: int = LOOKS[-1]
    error: float = 0.05
    """The chance of a wrong verdict, of either kind, at a true ratio of exactly the floor; less elsewhere."""
    widest: float = WIDEST
    """The 95% interval's upper limit over its lower one beyond which nothing passes that is not surely
    faster."""
    in_turns: bool = False
    """Whether its blocks are groups on servers that take turns."""

    @property
    def looks(self) -> tuple[int, ...]:
        """Return the numbers of blocks after which a decision is attempted; the last is `max_blocks`."""
        looks = TURN_LOOKS if self.in_turns else LOOKS
        return (*(blocks for blocks in looks if blocks < self.max_blocks), self.max_blocks)

    @property
    def of_groups(self) -> "SequentialTest":
        """Return the same test for groups of blocks, with the blocks that remain after the first
        `RESTART_FROM`.
        """
        groups = (self.max_blocks - RESTART_FROM) // GROUP
        return replace(self, max_blocks=groups, error=GROUPED_ERROR)

    @property
    def of_turns(self) -> "SequentialTest":
        """Return the same test for groups of blocks by servers that take turns."""
        groups = min(self.max_blocks // GROUP, TURN_LOOKS[-1])
        return replace(self, max_blocks=groups, error=TURN_ERROR, in_turns=True)

    def pass_error(self, blocks: int) -> float:
        """One-sided level of the lower limit at the look after `blocks`."""
        earlier = len(self.looks) - 1
        if earlier == 0:
            return self.error
        if self.in_turns:
            return self.error * 0.5 ** min(sum(look <= blocks for look in self.looks), earlier)
        if blocks >= self.max_blocks:
            return self.error * (LAST_SHARE + (1 - LAST_SHARE) * (1 - SPENT_AT_A_LOOK) ** earlier)
        before = sum(look < blocks for look in self.looks)
        return self.error * (1 - LAST_SHARE) * SPENT_AT_A_LOOK * (1 - SPENT_AT_A_LOOK) ** before

    def fail_error(self, blocks: int) -> float:
        """One-sided level of the upper limit at the look after `blocks`."""
        return self.pass_error(blocks) / self.number_of_ms


@dataclass(frozen=True)
class Decision:
    """The decision at one M. `low` and `high` are the limits with which the decision was made, corrected as
    above.
    """

    status: Status
    ratio: float
    low: float
    high: float
    blocks: int
    final: bool
    """Whether no further block is needed, since it is decided, or allowed."""
    correlation: float = 0.0
    """An upper limit for the correlation between a block and the next, by which all limits were widened."""
    shown: tuple[float, float] = (0.0, math.inf)
    """The 95% interval, without further corrections."""


def block_log_ratio(artifact: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the log ratio of one block: the geometric mean of the artifact's throughputs, divided by that of
    the baseline's.
    """
    return fmean(map(math.log, artifact)) - fmean(map(math.log, baseline))


def block_order(index: int, with_rival: bool = False) -> str:
    """Return the order of the repeats in block `index`: `A` the artifact, `B` the baseline, `R` a rival."""
    orders = ("ABR", "BRA") if with_rival else ("AB", "BA")
    return orders[index % 2]


def decide(log_ratios: Sequence[float], test: SequentialTest) -> Decision:
    """Decide as `decide_all` does, for one M alone."""
    return decide_all([log_ratios], test)[0]


def decide_all(
    series: Sequence[Sequence[float]], test: SequentialTest, by_estimate: Collection[int] = ()
) -> list[Decision]:
    """Return the decision at each M after the given blocks of each M, oldest first.

    The decision is replayed from the first look, so it depends on the blocks alone, and a decision once
    reached stands. Correlation between blocks comes from the machine and not from M, so it is estimated from
    all Ms together.

    series:      log ratios, [Ms][blocks]; what is undecided at a look has as many blocks as the look
    by_estimate: the indices of those that pass by their ratio, if it is known well enough, instead of their
                 lower limit
    """
    final: dict[int, Decision] = {}
    for blocks in test.looks:
        # What was decided counts as far as it had come: more of it may have been measured for other checks.
        seen = [values[: final[m].blocks if m in final else blocks] for m, values in enumerate(series)]
        due = [m for m, values in enumerate(seen) if m not in final and len(values) == blocks]
        if due:
            correlation = correlation_of(seen)
            looked = {m: _look(seen[m], test, correlation, m in by_estimate) for m in due}
            final |= {m: decision for m, decision in looked.items() if decision.final}
    correlation = correlation_of(series)
    return [final.get(m) or _estimate(values, test, correlation) for m, values in enumerate(series)]


def needs_new_servers(decisions: Sequence[Decision], test: SequentialTest) -> bool:
    """Say whether something is undecided because of a correlation that new servers may end."""
    return (
        test.max_blocks >= LEAST_FOR_GROUPS
        and all(decision.final or decision.blocks >= RESTART_FROM for decision in decisions)
        and any(not decision.final and decision.correlation >= STRONG for decision in decisions)
    )


def is_far_below(log_ratios: Sequence[float], floor: float) -> bool:
    """Say whether all ratios, at least one, are so far below the floor that one more look may be enough."""
    return bool(log_ratios) and max(log_ratios) < math.log(floor * HOPELESS)


def is_hopeless(first_looks: Sequence[float], floor: float) -> bool:
    """Say whether two looks in a row were so far below the floor that measuring more would be a waste."""
    return len(first_looks) >= 2 and is_far_below(first_looks, floor)


def _look(values: Sequence[float], test: SequentialTest, correlation: float, by_estimate: bool) -> Decision:
    decision = _estimate(values, test, correlation)
    reached = decision.ratio if by_estimate else decision.low
    if reached >= test.floor and _is_known(decision, test):
        return replace(decision, status="pass", final=True)
    if decision.high < test.floor:
        return replace(decision, status="fail", final=True)
    return replace(decision, final=len(values) >= test.max_blocks)


def _is_known(decision: Decision, test: SequentialTest) -> bool:
    """Say whether the 95% interval is narrow enough for the ratio to be published."""
    low, high = decision.shown
    return high <= low * test.widest or (low >= 1 and high <= low * WIDEST_IF_FASTER)


def _estimate(values: Sequence[float], test: SequentialTest, correlation: float) -> Decision:
    """Return the estimate and the limits from `values`, without a decision."""
    blocks = len(values)
    walk = test.in_turns
    low, high = interval(values, test.pass_error(blocks), test.fail_error(blocks), correlation, walk)
    shown = interval(values, SHOWN_ERROR, SHOWN_ERROR, correlation, walk)
    ratio = math.exp(trimmed(values).centre) if values else math.nan
    limits = math.exp(low), _exp(high)
    return Decision(
        "inconclusive", ratio, *limits, blocks, False, correlation, (math.exp(shown[0]), _exp(shown[1]))
    )


def correlation_of(series: Sequence[Sequence[float]], caution: float = CAUTION) -> float:
    """Return an upper limit for the correlation of neighbouring blocks. The cause of correlation is the
    machine, so all Ms count together."""
    return upper_correlation([winsorized(values) for values in series if values], caution)


def _exp(value: float) -> float:
    return math.exp(value) if value < MOST_LOG else math.inf


def chance_of_as_many(ours: int, theirs: int, share: float) -> float:
    """Return the chance that at least `ours` of all events happen in our `share` of the time, or of the
    answers, if events are equally frequent on both sides: the tail of a binomial.
    """
    total = ours + theirs
    return math.fsum(
        math.comb(total, count) * share**count * (1 - share) ** (total - count)
        for count in range(ours, total + 1)
    )
