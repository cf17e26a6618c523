"""Which server stands behind `--engine`: our own, vLLM, or one that is already running.

Builds endpoints, starts nothing. What a server is asked to hold is sized for the workload, alike on
both sides.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from ...layouts.errors import UserError
from ...serving_check.engines import SubprocessEndpoint, UrlEndpoint, vllm_endpoint
from ...serving_check.gate import CANARY_LENGTH, CANARY_PROMPT
from ...serving_check.settings import WorkloadSettings
from ..checkpoints.kv_cache import AUTO, UNQUANTIZED

EMBEDDED = "embedded"
VLLM = "vllm"
PAGE = 64
"""A multiple of any page size: each request's last page is partly empty."""

ServerEndpoint = SubprocessEndpoint | UrlEndpoint


@dataclass(frozen=True)
class EngineOptions:
    """What both servers are started with."""

    device: str
    dtype: str
    workload: WorkloadSettings
    logs: Path
    """Folder for the servers' logs."""
    progress: bool


def endpoint_of(
    engine: str,
    side: str,
    folder: Path,
    options: EngineOptions,
    layout: str | None = None,
    kv_cache_dtype: str = AUTO,
) -> ServerEndpoint:
    """The endpoint for `side` ("artifact" or "baseline"), serving `folder` unless `engine` is a URL."""
    if is_url(engine):
        if kv_cache_dtype != AUTO:
            raise UserError(f"{engine} is running already; --kv-cache-dtype is for it to be started with")
        return UrlEndpoint(engine)
    log = options.logs / f"{side}.log"
    workload = options.workload
    if engine == VLLM:
        dtype = None if options.dtype == "auto" else options.dtype
        kv_cache = () if kv_cache_dtype in (AUTO, UNQUANTIZED) else ("--kv-cache-dtype", kv_cache_dtype)
        return vllm_endpoint(
            str(folder), log=log, max_num_seqs=max(workload.ms), dtype=dtype, extra_arguments=kv_cache
        )
    if engine != EMBEDDED:
        raise UserError(f"unknown engine {engine!r}; give {EMBEDDED}, {VLLM}, or the URL of a running server")
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(folder), "--port", "0"]
    command += ["--served-model-name", side, "--device", options.device, "--dtype", options.dtype]
    command += ["--max-num-seqs", str(max(workload.ms)), "--kv-cache-tokens", str(pool_tokens(workload))]
    command += ["--max-model-len", str(request_tokens(workload))]
    command += ["--kv-cache-dtype", kv_cache_dtype]
    if layout is not None:
        command += ["--layout", layout]
    return SubprocessEndpoint(command, f"{side}'s server", log=log, progress=options.progress)


def is_url(engine: str) -> bool:
    return engine.startswith(("http://", "https://"))


def request_tokens(workload: WorkloadSettings) -> int:
    """The longest request that is sent, rounded up to whole pages."""
    longest = max(workload.input_len + workload.output_len, CANARY_PROMPT + CANARY_LENGTH)
    return (longest // PAGE + 1) * PAGE


def pool_tokens(workload: WorkloadSettings) -> int:
    """The KV pool both servers get: as many such requests as the largest M."""
    return max(workload.ms) * request_tokens(workload)
