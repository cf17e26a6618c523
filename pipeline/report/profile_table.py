"""The profile of loads as a table for the terminal, the page and the card: prompts and decoding
separately."""

from dataclasses import dataclass

from ...serving_check.checks.in_use.profile import described
from ...serving_check.evidence.profile_ratios import profile_ratios
from ...serving_check.evidence.verdict import Verdict

UNKNOWN = "?"


@dataclass(frozen=True)
class ProfileTable:
    """The description of the load, and a row for each part: its name, the ratio of speeds, the interval."""

    name: str
    sent: str
    rows: list[tuple[str, str, str]]


def profile_table(verdict: Verdict) -> ProfileTable | None:
    """Return the table of a verdict's profile; None if no profile was measured."""
    figures = None if verdict.evidence.in_use is None else verdict.evidence.in_use.profile
    if figures is None:
        return None
    ratios = profile_ratios(figures)
    rows = []
    for name, part in (("prompts", ratios.prompts), ("decoding", ratios.decoding)):
        low, high = part.shown
        ratio = UNKNOWN if part.ratio is None else f"{part.ratio:.2f}"
        rows.append((name, ratio, UNKNOWN if low is None or high is None else f"{low:.2f} to {high:.2f}"))
    return ProfileTable(figures.name, described(figures), rows)
