"""Whether the KV cache held what the workload needed: M requests of full length at once, none thrown out."""

from collections.abc import Sequence

from ...layouts.errors import UserError
from ..engines.prometheus_text import labelled
from ..engines.series import SCALEGATE_SERIES, Series
from ..settings import WorkloadSettings
from ..verdict import CheckResult, CurvePoint

NAME = "KV capacity"


def kv_cache_tokens(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> int | None:
    """How many tokens a server's KV cache holds, as its `/metrics` say; None where they do not."""
    for labels, _ in labelled(samples, series.cache_config):
        pages, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if pages.isdigit() and size.isdigit():
            return int(pages) * int(size)
    return None


def needed_tokens(workload: WorkloadSettings) -> int:
    return max(workload.ms) * (workload.input_len + workload.output_len)


def require_capacity(name: str, capacity: int | None, workload: WorkloadSettings) -> None:
    """Refuse a workload that cannot fit, before any of it is sent."""
    if capacity is not None and needed_tokens(workload) > capacity:
        raise UserError(
            f"M={max(workload.ms)} requests of {workload.input_len} + {workload.output_len} tokens need "
            f"{needed_tokens(workload)} tokens of KV cache, and {name} holds {capacity}; "
            "lower --m, --input-len or --output-len, or give the server more memory"
        )


def check_kv_capacity(
    curve: Sequence[CurvePoint], workload: WorkloadSettings, capacity: int | None
) -> CheckResult:
    """No preemption at any M. A server that does not count them leaves it open."""
    preemptions = {point.m: point.artifact.preemptions for point in curve}
    lost = {m: count for m, count in preemptions.items() if count}
    usage = max((point.artifact.kv_usage_max or 0.0 for point in curve), default=0.0)
    counted = bool(curve) and None not in preemptions.values()
    if lost:
        where = ", ".join(f"{count} preemptions at M={m}" for m, count in lost.items())
        reason = f"{where}: give the KV cache more memory, or promise a smaller M"
    elif counted:
        reason = "every request kept its pages from start to end"
    else:
        reason = "the server's /metrics tells nothing of preemptions"
    held = "capacity not reported" if capacity is None else f"holds {capacity} tokens"
    return CheckResult(
        name=NAME,
        status="fail" if lost else "pass" if counted else "inconclusive",
        measured=f"{held}, {usage:.0%} used at most, {sum(lost.values())} preemptions",
        bound=f"{needed_tokens(workload)} tokens (M={max(workload.ms)}) without a preemption",
        reason=reason,
        figures={"needed_tokens": needed_tokens(workload), "capacity_tokens": capacity, "usage_max": usage},
    )
