"""Whether the KV cache held what the workload needed: M requests of full length at once, none preempted."""

from collections.abc import Sequence

from ...base.errors import UserError
from ..adapters.prometheus_text import by_label, labelled
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.request_memory import RequestMemory
from ..evidence.verdict import CheckResult, CurvePoint, ServingFigures
from ..settings import WorkloadSettings
from .reached import reachable

NAME = "KV capacity"
FULL = 0.9
"""Share of the KV cache in use from which on it counts as full."""


def kv_cache_tokens(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> int | None:
    """Return how many tokens a server's KV cache holds, as its `/metrics` say; None if they do not say."""
    pool = _pages(samples, series)
    return None if pool is None else pool[0] * pool[1]


def request_memory(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> RequestMemory | None:
    """Return what a server keeps of each request, as its `/metrics` say; None if they do not say."""
    pool, kept = _pages(samples, series), by_label(samples, series.request_bytes, "kept")
    if pool is None or not kept:
        return None
    states = {
        f"{labels['format']} {labels['dtype']}": int(size)
        for labels, size in labelled(samples, series.request_bytes)
        if labels["kept"] == "state"
    }
    return RequestMemory(pool[1], int(kept["page"]), int(kept["row"]), states)


def _pages(samples: dict[str, float], series: Series) -> tuple[int, int] | None:
    """Return the number of pages of a server's KV cache, and the tokens in a page."""
    for labels, _ in labelled(samples, series.cache_config):
        pages, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if pages.isdigit() and size.isdigit():
            return int(pages), int(size)
    return None


def needed_tokens(workload: WorkloadSettings) -> int:
    return max(workload.ms) * (workload.input_len + workload.output_len)


def require_capacity(name: str, capacity: int | None, workload: WorkloadSettings) -> None:
    """Refuse a workload that cannot fit, before any of its requests is sent."""
    if capacity is not None and needed_tokens(workload) > capacity:
        raise UserError(
            f"M={max(workload.ms)} requests of {workload.input_len} + {workload.output_len} tokens need "
            f"{needed_tokens(workload)} tokens of KV cache, and {name} holds {capacity}; "
            "lower --m, --input-len or --output-len, or give the server more memory"
        )


def check_kv_capacity(
    curve: Sequence[CurvePoint],
    workload: WorkloadSettings,
    capacity: int | None,
    limit: int | None = None,
    share: float = 0.0,
    memory: RequestMemory | None = None,
) -> CheckResult:
    """Pass if nothing was preempted at any M, and as many requests ran as the server has room for by its own
    figures.

    The check is inconclusive if the server does not count preemptions.

    limit: the most requests that the server runs together; None if it does not say
    share: the share of M, or of the requests that ran on the baseline if they were fewer, that must be
        running
    memory: what the server keeps of each request; None if it does not say
    """
    preemptions = {point.m: point.artifact.preemptions for point in curve}
    lost = {m: count for m, count in preemptions.items() if count}
    broken = [point for point in curve if _breaks_promise(point, workload, capacity, limit, share)]
    held = _held(capacity, limit, memory)
    usage = max((point.artifact.kv_usage_max or 0.0 for point in curve), default=0.0)
    counted = bool(curve) and None not in preemptions.values()
    if lost:
        where = ", ".join(f"{count} preemptions at M={m}" for m, count in lost.items())
        reason = f"{where}: give the KV cache more memory, or validate at a smaller M (--m)"
    elif broken:
        reason = "; ".join(_broken_promise(point, workload, capacity) for point in broken) + (
            ". A request also needs memory besides its pages, for instance for tokens kept in 16 bits: "
            "reserve it for every request that may run"
        )
    elif counted:
        reason = "every request kept its pages from start to end"
    elif not curve:
        reason = "nothing was measured under load"
    else:
        reason = "the server's /metrics do not report preemptions"
    figures: dict[str, float | int | str | None] = {
        "needed_tokens": needed_tokens(workload),
        "capacity_tokens": capacity,
        "usage_max": usage,
    }
    if memory is not None and memory.states:
        figures["state_bytes"] = memory.state_bytes
    return CheckResult(
        name=NAME,
        status="fail" if lost or broken else "pass" if counted else "inconclusive",
        measured=f"{held}, {usage:.0%} used at most, {sum(lost.values())} preemptions",
        bound=f"{needed_tokens(workload)} tokens (M={max(workload.ms)}) without a preemption",
        reason=reason,
        figures=figures,
    )


def _held(capacity: int | None, limit: int | None, memory: RequestMemory | None) -> str:
    """Return `holds 4096 tokens`, or the states of how many requests, or both."""
    held = [] if capacity is None else [f"{capacity} tokens"]
    if memory is not None and memory.states and limit is not None:
        states = f"the states of {limit} requests, {memory.state_bytes / 1e6:.2f} MB each"
        held = [*held, states] if memory.page_bytes else [states]
    return f"holds {' and '.join(held)}" if held else "capacity not reported"


def _breaks_promise(
    point: CurvePoint, workload: WorkloadSettings, capacity: int | None, limit: int | None, share: float
) -> bool:
    """Say whether some requests were queued although all M fit, by the server's own figures, and the baseline
    ran more."""
    if capacity is None or limit is None or limit < point.m:
        return False
    holds = capacity // (workload.input_len + workload.output_len) >= point.m
    side = point.artifact
    expected = reachable(point)
    missing = expected - (side.running_mean or 0.0)
    queued = _waiting(side) >= missing / 2
    return holds and queued and missing > (1 - share) * expected and (side.kv_usage_max or 0.0) < FULL


def _waiting(side: ServingFigures) -> float:
    return max(side.waiting_max or 0.0, side.waiting_mean or 0.0)


def _broken_promise(point: CurvePoint, workload: WorkloadSettings, capacity: int | None) -> str:
    side, length = point.artifact, workload.input_len + workload.output_len
    return (
        f"at M={point.m} the KV cache has room for {(capacity or 0) // length} such requests, yet "
        f"{side.running_mean or 0.0:.3g} ran and {_waiting(side):.0f} waited with "
        f"{side.kv_usage_max or 0.0:.0%} of it in use"
    )
