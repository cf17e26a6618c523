"""Whether anything was compiled or captured while requests were served, which makes some requests pause.

The server's own monitor counts compilations; from outside such a pause looks like any other.
"""

from collections import Counter
from collections.abc import Mapping

from ..adapters.prometheus_text import labelled
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.verdict import CheckResult

NAME = "compilations in traffic"
SHOWN = 3
SHOWN_CHARACTERS = 300
"""How many characters of a compilation's key are shown."""

Compilations = Mapping[str, int]
"""How often each thing was compiled, by kind, kernel and key in a few words."""


def compilations(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> Compilations | None:
    """Return the kernels compiled since warm-up, according to `/metrics`; None if the server does not
    count.
    """
    counted = labelled(samples, series.compilations)
    if not counted:
        return None
    return {_words(labels): int(value) for labels, value in counted if value > 0}


def check_compilations(before: Compilations | None, after: Compilations | None) -> CheckResult:
    """Fail if anything was compiled between the first request and the last.

    A compiled kernel that is read from disk counts as well: on the next machine it is a compilation.

    before, after: the server's compilations by then
    """
    bound = "none"
    if before is None or after is None:
        reason = (
            "this engine's /metrics do not count compilations; their pauses show in throughput and latency"
        )
        return CheckResult(NAME, "unknown", "not known", bound, reason)
    during = Counter(after) - Counter(before)
    named = [f"{words[:SHOWN_CHARACTERS]} ({count}×)" for words, count in during.most_common(SHOWN)]
    if during:
        reason = (
            "; ".join(named)
            + ". Warm-up must run this kernel at this size, or the kernel must not specialize on it"
        )
    else:
        reason = "warm-up compiled every kernel and every size that ran"
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
