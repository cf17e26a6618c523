"""vLLM as an engine to validate on: `vllm serve`, for users who deploy vLLM."""

from dataclasses import replace

from ...base.errors import UserError
from ...base.option_fields import flag
from ..engine.options import AUTO
from .engine import CardCommand, Engine, ServerJob
from .external_command import ExternalCommand
from .placement import PLACEMENT
from .series import VLLM_SERIES
from .subprocess_endpoint import LogReader, SubprocessEndpoint, Telemetry
from .vllm_log import COMPILATIONS, compilations_in, ending_of, failure_of, kernels_in, stage_of

KV_FORMATS = ("fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4")
"""The KV formats that vLLM 0.26 supports under the same names as Scalegate."""
COMMAND = ExternalCommand("vllm", "vLLM", {name: name for name in KV_FORMATS})
INVARIANT, INVARIANT_VARIABLE = "pin", "VLLM_BATCH_INVARIANT"
"""The mode of ours that equals vLLM's batch-invariant mode, and the variable that turns the latter on."""
SHARE, KV_CACHE = "--gpu-memory-utilization", "--kv-cache-memory-bytes"
TELEMETRY = Telemetry(
    replace(VLLM_SERIES, compilations=COMPILATIONS),
    log=LogReader(stage_of, failure_of, ending_of, compilations_in, kernels_in),
)


def _server(job: ServerJob) -> SubprocessEndpoint:
    """Starts `vllm serve` without prefix caching, which would make repeated prompts look fast."""
    options, placement = job.options, job.placement
    words = ["--no-enable-prefix-caching", "--max-num-seqs", str(options.max_num_seqs)]
    if job.memory is not None:
        words += [SHARE, f"{job.memory.share:.4f}"]
        if job.memory.kv_cache_bytes is not None:
            words += [KV_CACHE, str(job.memory.kv_cache_bytes)]
    if options.max_model_len is not None:
        words += ["--max-model-len", str(options.max_model_len)]
    if options.dtype != AUTO:
        words += ["--dtype", options.dtype]
    words += COMMAND.required_kv_cache_words(options.kv_cache_dtype)
    if options.jit_monitor == "error":
        words += ["--jit-monitor-mode", options.jit_monitor]
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(placement, name) > 1:
            words += [flag(name), str(getattr(placement, name))]
    environment = {}
    if options.batch_invariance != "tuned":
        if options.batch_invariance != INVARIANT:
            raise UserError(
                f"vLLM does not serve --batch-invariance {options.batch_invariance}; give {INVARIANT}"
            )
        environment[INVARIANT_VARIABLE] = "1"
    return COMMAND.server(job, [str(job.folder)], words, TELEMETRY, environment)


VLLM = Engine(
    name="vllm",
    title="vLLM",
    server=_server,
    availability=COMMAND.availability,
    versions=COMMAND.versions,
    series=TELEMETRY.series,
    options=frozenset(
        {"dtype", "max_num_seqs", "max_model_len", "kv_cache_dtype", "jit_monitor", "batch_invariance"}
    )
    | PLACEMENT,
    memory_option=SHARE,
    takes_kv_cache_bytes=True,
    card_command=lambda model, method: CardCommand("vLLM", "sh", f"vllm serve {model}"),
    kv_cache_words=COMMAND.kv_cache_words,
)
