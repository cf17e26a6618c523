"""Which parts of requests are judged separately at an M: prompts, decoding, or both.

A part that takes little of the time is hidden by the other part. The baseline's first blocks show the share
of each part. The choice is thus fixed before anything is decided, and a reader of the verdict can repeat it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..settings import WorkloadSettings
from ..statistics.decide import LOOKS
from .measurement import MeasuredM, Repeat
from .steady_decoding import LEAST_TOKENS

LARGE = 0.3
"""If prompts take at least this share of the time, prompts and decoding are judged separately."""
SMALL = 0.1
"""If prompts take less than this share of the time, decoding is not judged separately from whole requests."""


@dataclass(frozen=True)
class PartsApart:
    """The parts that are judged separately at one M, besides whole requests."""

    decoding: bool = False
    prompts: bool = False

    @property
    def count(self) -> int:
        return self.decoding + self.prompts


def parts_apart(level: MeasuredM, workload: WorkloadSettings) -> PartsApart:
    """Judge prompts if they take a large share of the baseline's time, and decoding unless its share is
    small.

    Prompts are judged only at given Ms: their speed depends on their length, and prompts at drawn Ms are
    short. Suppose that the baseline shows no decoding. If prompts take little time, M was drawn, or answers
    are too short, decoding is then not judged. Otherwise it stays undecided.
    """
    share = prompt_share(level)
    if share is None:
        return PartsApart(decoding=workload.decoding_apart)
    repeats = _first(level)
    shown = 2 * sum(repeat.steady_decoding is not None for repeat in repeats) > len(repeats)
    prompts = share > LARGE and level.m in workload.ms
    hidden = prompts and workload.output_len >= 2 * LEAST_TOKENS
    decoding = workload.decoding_apart or (1 - share > SMALL and (shown or hidden))
    return PartsApart(decoding, prompts)


def prompt_share(level: MeasuredM) -> float | None:
    """Return the share of the baseline's time, 0 to 1, median over its first repeats; None in verdicts
    without this figure.
    """
    known = [
        repeat.prefill_seconds / repeat.duration
        for repeat in _first(level)
        if repeat.prefill_seconds is not None and repeat.duration > 0
    ]
    return median(known) if known else None


def _first(level: MeasuredM) -> Sequence[Repeat]:
    """Return the baseline's repeats up to the first look."""
    return level.baseline[: LOOKS[0]]
