"""Finds in an engine's log what patterns know: stages of a start, and why one failed."""

import re
from collections.abc import Sequence

Pairs = Sequence[tuple[str, str]]
"""A pattern, and what is said where it is found."""


def last_stage(stages: Pairs, log: str) -> str | None:
    """What is said of the last mark in the log, filled with what its pattern caught; None without one."""
    last, said = -1, None
    for pattern, words in stages:
        for match in re.finditer(pattern, log):
            if match.start() > last:
                last, said = match.start(), words.format(*match.groups())
    return said


def first_failure(failures: Pairs, log: str) -> str | None:
    """The cause as the log has it, and what to do, in one line; the pairs are tried in their order."""
    for pattern, remedy in failures:
        match = re.search(pattern, log)
        if match:
            return f"{' '.join(match[0].split())}; {remedy}"
    return None
