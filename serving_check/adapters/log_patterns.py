"""Finds patterns in an engine's log: stages of a start, and the reason of a failure."""

import re
from collections.abc import Sequence

Pairs = Sequence[tuple[str, str]]
"""Pairs of a pattern and the text for a log in which it is found."""


def last_stage(stages: Pairs, log: str) -> str | None:
    """Return the text of the last mark in the log, filled with the matched words; None without a mark."""
    last, said = -1, None
    for pattern, words in stages:
        for match in re.finditer(pattern, log):
            if match.start() > last:
                last, said = match.start(), words.format(*match.groups())
    return said


def first_failure(failures: Pairs, log: str) -> str | None:
    """Return the cause in the log's words, and a remedy, in one line; the pairs are tried in order."""
    for pattern, remedy in failures:
        match = re.search(pattern, log)
        if match:
            return f"{' '.join(match[0].split())}; {remedy}"
    return None
