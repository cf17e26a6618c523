"""How fast prompts are read and answers decoded under a profile of loads, artifact over baseline, each
separately.

The module is arithmetic only; `checks/in_use/profile.py` judges, and card and report show the same figures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..statistics.trimmed_mean import interval
from .in_use import PartsInUse, ProfileFigures

SHOWN_ERROR = 0.025
"""The error probability on either side of a 95% interval."""
LEAST_GAPS = 60
"""The least number of gaps between chunks in a block on both sides, as for an M of the load as in use."""

Pair = tuple[PartsInUse, PartsInUse]
"""The artifact's and the baseline's part of one block."""


@dataclass(frozen=True)
class PartRatio:
    """One part of requests: the speed of the artifact over the baseline's."""

    logs: tuple[float, ...]
    """The log ratio of each block in which the part was measured on both sides."""

    @property
    def ratio(self) -> float | None:
        return math.exp(math.fsum(self.logs) / len(self.logs)) if self.logs else None

    @property
    def shown(self) -> tuple[float | None, float | None]:
        """Return the 95% interval; None for a single block, which has no interval."""
        low, high = self.limits(SHOWN_ERROR)
        return (low if low > 0 else None), (high if math.isfinite(high) else None)

    def limits(self, error: float) -> tuple[float, float]:
        """Return the confidence limits at a one-sided level of `error` each; 0 and infinity for fewer than
        two blocks."""
        low, high = interval(self.logs, error, error)
        return math.exp(low), math.exp(high) if math.isfinite(high) else math.inf


@dataclass(frozen=True)
class ProfileRatios:
    """The ratios of prompts and of decoding under a profile."""

    prompts: PartRatio
    decoding: PartRatio
    longer: float | None
    """Time to the first token of the longer half of the prompts, artifact over baseline, median."""
    shorter: float | None
    """The same for the shorter half."""
    half: int
    """Number of tokens of the median prompt."""


def profile_ratios(figures: ProfileFigures) -> ProfileRatios:
    pairs = [
        (block.artifact.parts, block.baseline.parts)
        for block in figures.blocks
        if block.artifact and block.baseline and block.artifact.parts and block.baseline.parts
    ]
    half = int(median([length for lengths in figures.prompt_lengths for length in lengths] or [0]))
    return ProfileRatios(
        prompts=_logs(pairs, _of_prompts),
        decoding=_logs(pairs, _of_decoding),
        longer=_ttft_ratio(figures, lambda length: length > half),
        shorter=_ttft_ratio(figures, lambda length: length <= half),
        half=half,
    )


def _logs(pairs: Sequence[Pair], of: Callable[[Pair], float | None]) -> PartRatio:
    return PartRatio(tuple(math.log(ratio) for pair in pairs if (ratio := of(pair))))


def _of_prompts(pair: Pair) -> float | None:
    """Return the ratio of the speeds at which prompts are read: both sides read the same prompts, so times
    suffice."""
    ours, theirs = (side.prompt_seconds for side in pair)
    return theirs / ours if ours and theirs else None


def _of_decoding(pair: Pair) -> float | None:
    """Return the ratio of decoding speeds at the Ms that both sides had. An M counts by the lesser number of
    gaps."""
    ours, theirs = (side.steady_itls_by_m for side in pair)
    shared = {m: min(ours[m][0], theirs[m][0]) for m in ours.keys() & theirs.keys()}
    if sum(shared.values()) < LEAST_GAPS:
        return None
    own = _seconds(ours, shared)
    return _seconds(theirs, shared) / own if own > 0 else None


def _seconds(itls_by_m: Mapping[int, tuple[int, float]], gaps: Mapping[int, int]) -> float:
    return math.fsum(count * itls_by_m[m][1] for m, count in sorted(gaps.items()))


def _ttft_ratio(figures: ProfileFigures, counts: Callable[[int], bool]) -> float | None:
    ratios = [
        ours / theirs
        for block, lengths in zip(figures.blocks, figures.prompt_lengths, strict=False)
        if block.artifact and block.baseline
        for length, ours, theirs in zip(lengths, block.artifact.ttfts, block.baseline.ttfts, strict=True)
        if counts(length) and ours and theirs
    ]
    return median(ratios) if ratios else None
