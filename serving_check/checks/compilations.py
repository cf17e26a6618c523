"""Whether anything was compiled or captured while requests were served: a pause that some of them felt.

The server's own monitor says so; from outside such a pause looks like any other.
"""

from collections import Counter
from collections.abc import Mapping

from ..adapters.prometheus_text import labelled
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.verdict import CheckResult

NAME = "compilations in traffic"
SHOWN = 3
SHOWN_CHARACTERS = 300
"""Of one compilation's key, which can be long."""

Compilations = Mapping[str, int]
"""How often each thing was compiled, by kind, kernel and key in a few words."""


def compilations(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> Compilations | None:
    """What was compiled since warm-up, in one look at `/metrics`; None where nobody counts."""
    counted = labelled(samples, series.compilations)
    if not counted:
        return None
    return {_words(labels): int(value) for labels, value in counted if value > 0}


def check_compilations(before: Compilations | None, after: Compilations | None) -> CheckResult:
    """Nothing between two looks, one before the first request and one after the last.

    A compiled kernel that is read from disk counts as well: on the next machine it is a compilation.
    """
    bound = "none"
    if before is None or after is None:
        reason = "this engine's /metrics does not count them; a pause by one shows in throughput and latency"
        return CheckResult(NAME, "unknown", "not known", bound, reason)
    during = Counter(after) - Counter(before)
    named = [f"{words[:SHOWN_CHARACTERS]} ({count}×)" for words, count in during.most_common(SHOWN)]
    if during:
        reason = "; ".join(named) + ". Warm-up must meet it, or the kernel must not specialize on what runs"
    else:
        reason = "warm-up had met every kernel and every size that ran"
    return CheckResult(
        name=NAME,
        status="fail" if during else "pass",
        measured=f"{during.total()} compilations while serving",
        bound=bound,
        reason=reason,
        figures={"compilations": during.total()},
    )


def _words(labels: dict[str, str]) -> str:
    key = labels.get("key")
    return f"{labels.get('kind')} of {labels.get('kernel')}" + (f" for {key}" if key else "")
