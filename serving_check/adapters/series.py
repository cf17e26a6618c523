"""Our names for servers' figures, and the Prometheus series of each engine.

`prometheus_text.py` reads the figures, and `..checks` judge them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """The series of `/metrics` that holds each figure; None if an engine has none.

    Names of counters include the ending `_total`. A name may be followed by labels, as in a Prometheus
    selector: then only samples with these labels count.
    """

    running: str | None = None
    """Number of requests in the running batch."""
    waiting: str | None = None
    kv_cache_usage: str | None = None
    """Share of the KV cache in use, 0 to 1."""
    preemptions: str | None = None
    preemptions_appear_late: bool = False
    """Whether the counter of preemptions is absent until the first preemption."""
    prompt_tokens: str | None = None
    generation_tokens: str | None = None
    cache_config: str | None = None
    """The KV cache's capacity, in the labels `num_gpu_blocks` and `block_size`."""
    request_bytes: str | None = None
    """Bytes kept of each request; labels `kept`, `format` and `dtype`."""
    max_num_seqs: str | None = None
    """The most requests that run together."""
    steps_by_running: str | None = None
    """Number of engine steps. The label `running` says how many requests decoded in them."""
    waiting_request_steps: str | None = None
    """Number of waiting requests, summed over steps."""
    step_seconds: str | None = None
    host_seconds: str | None = None
    """Seconds of steps, without waiting for the GPU or, on a CPU, without running the model."""
    device_busy_seconds: str | None = None
    device_idle_seconds: str | None = None
    compilations: str | None = None
    """Number of compilations since warm-up; labels `kind`, `kernel` and `key`."""
    packed_layers: str | None = None
    """Number of quantized linear layers; labels `layout` and `shape`."""
    emulated_products: str | None = None
    """Number of products that emulate the format of their inputs; labels `inputs` and `hardware`."""
    memory: str | None = None
    """Resident bytes of the server's processes; label `process` if there are several."""


VLLM_SERIES = Series(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_cache_usage="vllm:kv_cache_usage_perc",
    preemptions="vllm:num_preemptions_total",
    prompt_tokens="vllm:prompt_tokens_total",
    generation_tokens="vllm:generation_tokens_total",
    cache_config="vllm:cache_config_info",
)
SCALEGATE_SERIES = Series(
    **{name: series for name, series in vars(VLLM_SERIES).items() if series is not None},
    request_bytes="scalegate:request_bytes",
    max_num_seqs="scalegate:max_num_seqs",
    steps_by_running="scalegate:engine_steps_total",
    waiting_request_steps="scalegate:waiting_request_steps_total",
    step_seconds="scalegate:engine_step_seconds_total",
    host_seconds="scalegate:engine_host_seconds_total",
    device_busy_seconds="scalegate:device_busy_seconds_total",
    device_idle_seconds="scalegate:device_idle_seconds_total",
    compilations="scalegate:compilations_total",
    packed_layers="scalegate:packed_layers",
    emulated_products="scalegate:emulated_products",
    memory="process_resident_memory_bytes",
)
"""The series of our server: vLLM's names, and our own names only if vLLM has none.

vLLM has `memory` too, but of its API process alone: the process tree of a server started here tells more.
"""
