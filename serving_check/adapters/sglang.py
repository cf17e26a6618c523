"""SGLang as an engine to validate on: `sglang serve`.

The options, series and log lines are those in the source of SGLang 0.5.16.
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
SPARE_TOKENS = 3
"""Tokens that SGLang needs for each request beyond the request's own.

SGLang shortens an answer silently unless prompt and answer leave two tokens of the context free
(`Scheduler.init_req_max_new_tokens`). It admits a request only if more than two tokens of the KV pool would
stay free for each running request that ignores the end of sequence (`PrefillAdder.add_one_req_ignore_eos`).
"""
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""The variable that lets a context with spare tokens exceed what the model's config.json says. No request is
longer than the config allows."""
IDLE_RENEWAL_S = 30.0
"""How often an idle SGLang server renews its metrics (`_maybe_log_idle_metrics`)."""
FIRST_STAGE = '{pp_rank="0"}'
"""Every pipeline stage counts all waiting and retracted requests and the tokens of its own KV pool, but runs
its own part of the requests at a time (`Scheduler.running_mbs`)."""
SERIES = Series(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs" + FIRST_STAGE,
    kv_cache_usage="sglang:token_usage" + FIRST_STAGE,
    preemptions="sglang:num_retracted_requests_total" + FIRST_STAGE,
    preemptions_appear_late=True,
    prompt_tokens="sglang:prompt_tokens_total",
    generation_tokens="sglang:generation_tokens_total",
)
STAGES = (
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "weights are loaded"),
    (r"KV Cache is allocated|Memory pool end", "the KV cache is allocated"),
    (r"Capture [^\n]*(?:cuda|CUDA) graph begin", "capturing graphs"),
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
        r"[^\n]*[Aa]ddress already in use[^\n]*|\w+ at \d+ is not available in \d+ seconds[^\n]*",
        "another program took the port meanwhile: run it again",
    ),
    (
        r"Unknown quantization method[^\n]*?(?=\. Must|\n|$)|"
        r"(?:The quantization method|Quantization scheme) [^\n]*? ?is not supported[^\n]*|"
        r"No compressed-tensors compatible scheme was found[^\n]*",
        "this SGLang does not read the format: use a newer one, another --export, or --engine embedded",
    ),
    (
        r"Model architectures \[[^\]]*\] are not supported for now",
        "this SGLang does not have the model: use a newer one, or --engine embedded",
    ),
    (r"(?:sglang|launch_server\.py): error: [^\n]*", "see `sglang serve --help`; check --engine-args"),
    (
        r"(?:Value|Runtime|Assertion|Key|Type|Import|ModuleNotFound|NotImplemented)Error: [^\n]*",
        "see the log",
    ),
)
ENDINGS = (
    OUT_OF_MEMORY,
    (
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code -(?:9|15)",
        "another process ended it, or the machine is out of memory",
    ),
)
"""Patterns for a server that the machine ended: SGLang's watchdog names the signal that killed a process."""
READER = LogReader(
    functools.partial(last_stage, STAGES),
    functools.partial(first_failure, FAILURES),
    functools.partial(first_failure, ENDINGS),
)
TELEMETRY = Telemetry(SERIES, renewal_s=IDLE_RENEWAL_S, log=READER)


def _server(job: ServerJob) -> SubprocessEndpoint:
    """Starts `sglang serve` without prefix caching, which would make repeated prompts look fast.

    The server's KV pool is given in tokens, so that it takes no more of the GPU than the load needs.
    """
    options, placement = job.options, job.placement
    environment = {}
    words = ["--disable-radix-cache", "--enable-metrics"]
    words += ["--max-running-requests", str(options.max_num_seqs)]
    if options.max_model_len is not None:
        words += ["--context-length", str(options.max_model_len + SPARE_TOKENS)]
        environment[LONGER_CONTEXT] = "1"
    if options.kv_cache_tokens is not None:
        pool = options.kv_cache_tokens + SPARE_TOKENS * options.max_num_seqs
        words += ["--max-total-tokens", str(pool)]
    if options.dtype != AUTO:
        words += ["--dtype", options.dtype]
    words += COMMAND.required_kv_cache_words(options.kv_cache_dtype)
    if placement.tensor_parallel_size > 1:
        words += ["--tp-size", str(placement.tensor_parallel_size)]
    if placement.pipeline_parallel_size > 1:
        words += ["--pp-size", str(placement.pipeline_parallel_size)]
    return COMMAND.server(job, ["--model-path", str(job.folder)], words, TELEMETRY, environment)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    server=_server,
    availability=COMMAND.availability,
    versions=COMMAND.versions,
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
