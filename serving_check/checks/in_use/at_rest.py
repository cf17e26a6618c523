"""Whether the artifact's server lets go of everything when its load has ended: requests, KV cache, memory."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...evidence.at_rest import AtRestFigures, BurstPart
from ...evidence.verdict import CheckResult

NAME = "at rest"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MOST_BYTES_A_REQUEST = 1 * KIB
"""The bytes by which memory may grow with every request of a burst: a GiB in a million requests. The growth
of sound servers is in `tests/bench/results/gate/at_rest.json`; over 80,000 requests ours grew by 0.15 bytes
each (`tests/bench/results/server/endurance.json`)."""
MOST_GROWTH = 5 * MIB // 4
"""Bytes by which memory may grow in a burst, however few its requests are: heaps grow in steps of a MiB, and
the parts with the most growth are left out."""
LEAST_PARTS, JUDGED_PARTS = 6, 4
"""The least number of parts whose growth must be known, and how many are judged: the ones with the least
growth. A heap fills once, and a library keeps a kernel for each new shape: with aborted requests in the
burst, a sound server in bfloat16 on a CPU grew by 2 MiB in either of the first two parts, by 1 MiB in the
third, and by 40 KiB in the others. On a busy machine parts have fewer requests, and another one grew by half
a MiB in each of seven; so further parts follow where memory seems to grow."""
SHOWN = 3


def check_at_rest(figures: AtRestFigures) -> CheckResult:
    """Fail if anything runs or waits, if more of the KV cache is in use than before, if memory grows with
    every request, or if requests of the burst failed.
    """
    growth = bytes_a_request(figures.burst)
    problems = [*_left(figures), *_grows(figures.burst), *_failed(figures.errors)]
    after = figures.after
    known = {
        "requests": after.running,
        "the KV cache in use": after.kv_cache_usage,
        "memory": growth,
    }
    unknown = [name for name, value in known.items() if value is None]
    nothing_known = len(unknown) == len(known)
    reason = "; ".join(problems)
    if not problems:
        reason = "" if nothing_known else "nothing is left of the load"
        if unknown:
            reason += f"{'; ' if reason else ''}the server does not tell {', '.join(unknown)}"
    return CheckResult(
        name=NAME,
        status="fail" if problems else "unknown" if nothing_known else "pass",
        measured=_measured(figures, growth),
        bound=f"0 requests, the KV cache as before, {MOST_BYTES_A_REQUEST} bytes of memory a request",
        reason=reason,
        figures={
            "running": after.running,
            "waiting": after.waiting,
            "kv_cache_usage_before": figures.before.kv_cache_usage,
            "kv_cache_usage": after.kv_cache_usage,
            "bytes_a_request": growth,
            "memory_bytes_before": figures.before.memory_bytes,
            "memory_bytes": after.memory_bytes,
            "requests": figures.requests,
            "failed_requests": len(figures.errors),
        },
    )


def shows_growth(burst: Sequence[BurstPart]) -> bool:
    """Say whether memory grows by more than the bound with every request."""
    return bool(_grows(burst))


def bytes_a_request(parts: Sequence[BurstPart]) -> float | None:
    """Return the bytes by which memory grows with every request, in the parts of the burst in which it grows
    least; None if unknown.
    """
    grown = _grown(parts)
    return None if grown is None else grown.memory_bytes / grown.requests


@dataclass(frozen=True)
class _Growth:
    memory_bytes: int
    requests: int


def _grown(parts: Sequence[BurstPart]) -> _Growth | None:
    known = [(part.requests, part.memory_bytes) for part in parts if part.memory_bytes is not None]
    grown = [
        _Growth(after - before, requests) for (_, before), (requests, after) in itertools.pairwise(known)
    ]
    if len(grown) < LEAST_PARTS:
        return None
    least = sorted(grown, key=lambda growth: growth.memory_bytes)[:JUDGED_PARTS]
    return _Growth(sum(growth.memory_bytes for growth in least), sum(growth.requests for growth in least))


def _left(figures: AtRestFigures) -> list[str]:
    before, after = figures.before, figures.after
    problems = []
    if after.running or after.waiting:
        problems.append(
            f"{after.running or 0:.0f} requests run and {after.waiting or 0:.0f} wait although every client "
            "has its answer or has left: requests never end, or go on without their client"
        )
    used, used_before = after.kv_cache_usage or 0.0, before.kv_cache_usage or 0.0
    if used > used_before:
        problems.append(
            f"{used:.2%} of the KV cache is in use, {used_before:.2%} before {figures.requests:,} requests: "
            "pages of some were never freed, perhaps of aborted ones"
        )
    return problems


def _grows(burst: Sequence[BurstPart]) -> list[str]:
    grown, growth = _grown(burst), bytes_a_request(burst)
    if grown is None or growth is None or growth <= MOST_BYTES_A_REQUEST or grown.memory_bytes <= MOST_GROWTH:
        return []
    return [
        f"memory grows by {growth / KIB:.1f} KiB with every request, {grown.memory_bytes / MIB:.1f} MiB in "
        f"{grown.requests:,} of them: something is kept of each ({growth * 1e6 / GIB:.1f} GiB of a million)"
    ]


def _failed(errors: Sequence[str]) -> list[str]:
    if not errors:
        return []
    return [f"requests failed after the load: {'; '.join(errors[:SHOWN])}"]


def _measured(figures: AtRestFigures, growth: float | None) -> str:
    after = figures.after
    running = (
        "requests not reported"
        if after.running is None
        else f"{after.running + (after.waiting or 0.0):.0f} requests"
    )
    usage = "KV use not reported" if after.kv_cache_usage is None else f"KV {after.kv_cache_usage:.2%} used"
    grows = "memory not known" if growth is None else f"{growth:.0f} bytes a request"
    return f"{running}, {usage}, {grows}"
