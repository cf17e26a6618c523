"""SGLang as an engine to validate on: `sglang serve`.

The file follows SGLang's documentation (server arguments, production metrics); SGLang was not run.
"""

import functools

from ..engine.options import AUTO
from .engine import CardCommand, Engine, ServerJob
from .external_command import ExternalCommand
from .log_patterns import first_failure, last_stage
from .placement import PLACEMENT
from .series import Series
from .subprocess_endpoint import LogReader, SubprocessEndpoint, Telemetry

COMMAND = ExternalCommand("sglang", "SGLang", {"fp8": "fp8_e4m3"})
"""An idle SGLang server renews its metrics every 30 seconds (`_maybe_log_idle_metrics`)."""
SERIES = Series(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    kv_cache_usage="sglang:token_usage",
    prompt_tokens="sglang:prompt_tokens_total",
    generation_tokens="sglang:generation_tokens_total",
)
STAGES = (
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "weights are loaded"),
    (r"KV Cache is allocated|Memory pool end", "the KV cache is allocated"),
    (r"Capture (?:cuda graph|CUDA graph) begin", "capturing graphs"),
    (r"The server is fired up", "serving"),
)
OUT_OF_MEMORY = (
    r"(?:torch\.)?OutOfMemoryError: [^\n]*|CUDA out of memory[^\n]*",
    "use a smaller --m or --input-len, more GPUs with --tensor-parallel-size, or another share with "
    '--engine-args "--mem-fraction-static 0.4"',
)
FAILURES = (
    OUT_OF_MEMORY,
    (
        r"Not enough memory[^\n]*",
        'end what else runs on that GPU, or give --engine-args "--mem-fraction-static 0.9"',
    ),
    (
        r"[^\n]*[Aa]ddress already in use[^\n]*",
        "another program took the port meanwhile: run it again",
    ),
    (
        r"Unknown quantization method[^\n]*|[^\n]*quantization[^\n]*not supported[^\n]*",
        "this SGLang does not read the format: use a newer one, another --export, or --engine embedded",
    ),
    (r"(?:sglang|launch_server\.py): error: [^\n]*", "see `sglang serve --help`; check --engine-args"),
    (r"(?:Value|Runtime|Assertion|Key|Type|Import|ModuleNotFound)Error: [^\n]*", "see the log"),
)
READER = LogReader(
    functools.partial(last_stage, STAGES),
    functools.partial(first_failure, FAILURES),
    functools.partial(first_failure, (OUT_OF_MEMORY,)),
)
TELEMETRY = Telemetry(SERIES, renewal_s=30.0, log=READER)


def _server(job: ServerJob) -> SubprocessEndpoint:
    """Starts `sglang serve` without prefix caching, which would make repeated prompts look fast.

    The server's KV pool is given in tokens, so that it takes no more of the GPU than the load needs.
    """
    options, placement = job.options, job.placement
    words = ["--disable-radix-cache", "--enable-metrics"]
    words += ["--max-running-requests", str(options.max_num_seqs)]
    if options.max_model_len is not None:
        words += ["--context-length", str(options.max_model_len)]
    if options.kv_cache_tokens is not None:
        words += ["--max-total-tokens", str(options.kv_cache_tokens)]
    if options.dtype != AUTO:
        words += ["--dtype", options.dtype]
    words += COMMAND.required_kv_cache_words(options.kv_cache_dtype)
    if placement.tensor_parallel_size > 1:
        words += ["--tp-size", str(placement.tensor_parallel_size)]
    if placement.pipeline_parallel_size > 1:
        words += ["--pp-size", str(placement.pipeline_parallel_size)]
    return COMMAND.server(job, ["--model-path", str(job.folder)], words, TELEMETRY)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    server=_server,
    availability=COMMAND.availability,
    series=SERIES,
    options=frozenset({"dtype", "max_num_seqs", "max_model_len", "kv_cache_tokens", "kv_cache_dtype"})
    | PLACEMENT,
    card_command=lambda model, method: (
        None
        if method == "torchao"
        else CardCommand("SGLang", "sh", f"python -m sglang.launch_server --model-path {model}")
    ),
    kv_cache_words=COMMAND.kv_cache_words,
)
