"""Reads vLLM's log: the progress of a start, the reason of a failure, the kernels that serve, compilations.

The known lines are the lines that vLLM 0.26 logs; all other lines are ignored.
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .log_patterns import first_failure, last_stage

COMPILATIONS = "scalegate:log_compilations"
"""The name of a series that is made from the log, as if `/metrics` contained it."""

STAGES = (
    (r"Loading safetensors checkpoint shards:\s+(\d+%)", "loading weights, {}"),
    (r"Starting to load model", "loading weights"),
    (r"Model loading took", "weights are loaded"),
    (r"Using cache directory|Dynamo bytecode transform", "compiling the model"),
    (r"GPU KV cache size: ([\d,]+) tokens", "a KV cache of {} tokens"),
    (r"Capturing (?:CUDA|cudagraph|CUDA graph).*?(\d+%)", "capturing graphs, {}"),
    (r"Graph capturing finished", "graphs are captured"),
    (r"Starting vLLM (?:API )?server", "opening its port"),
)
"""Patterns for the stages of a start, and the text that describes each stage."""

OUT_OF_MEMORY = (
    r"(?:torch\.)?OutOfMemoryError: [^\n]*|CUDA (?:error: )?out of memory[^\n]*",
    "use a smaller --m or --input-len, more GPUs with --tensor-parallel-size, or a larger share with "
    '--engine-args "--gpu-memory-utilization 0.9" (the servers then take turns)',
)
FAILURES = (
    (
        r"Free memory on device .*?is less than desired GPU memory utilization \([^)\n]*\)",
        "end what else runs on that GPU, name another with --devices, or give less with "
        '--engine-args "--gpu-memory-utilization 0.4"',
    ),
    OUT_OF_MEMORY,
    (
        r"No available memory for the cache blocks",
        'give more with --engine-args "--gpu-memory-utilization 0.9" (the servers then take turns)',
    ),
    (
        r"To serve at least one request with the models? ?'?s? max seq len[^\n]*?KV cache memory \([^)]*\)",
        'use a smaller --max-model-len, or give more with --engine-args "--gpu-memory-utilization 0.9"',
    ),
    (
        r"Unknown quantization method: [^\n]*?(?=\. Must|\n|$)|"
        r"(?:The quantization method|Quantization scheme) [^\n]*? is not supported[^\n]*|"
        r"No compressed-tensors compatible scheme was found[^\n]*",
        "this vLLM does not read the format: use a newer one, another --export, or --engine embedded",
    ),
    (
        r"Model architectures \[[^\]]*\] are not supported for now",
        "this vLLM does not have the model: use a newer one, or --engine embedded",
    ),
    (
        r"[^\n]*(?:head size|head_size)[^\n]*not supported[^\n]*|No valid attention backend[^\n]*",
        "this vLLM has no attention kernel for the model on this GPU: use a newer one, or --engine embedded",
    ),
    (
        r"Failed to find a kernel that can implement[^\n]*Reasons: *"
        r"(?:\n[^\n]*(?:Kernel\w*:| cannot implement | disabled by | requires capability )[^\n]*)*",
        "this vLLM has no kernel for a layer on this device: use another --export, or --engine embedded",
    ),
    (
        r"[^\n]*no kernel image is available[^\n]*|[^\n]*Failed to find a kernel that can implement[^\n]*|"
        r"[^\n]*undefined symbol[^\n]*|ModuleNotFoundError: [^\n]*|ImportError: [^\n]*",
        "this vLLM was built without a kernel that the model needs on this GPU: install one that was built "
        "for it",
    ),
    (
        r"\[Errno 98\][^\n]*|[^\n]*[Aa]ddress already in use[^\n]*",
        "another program took the port meanwhile: run it again",
    ),
    (
        r"(?m)\b(?:vllm|main\.py|api_server\.py)(?: [\w-]+)*: error: .+$",
        "see `vllm serve --help`; check --engine-args and --baseline-engine-args",
    ),
    (r"(?<=Value error, )[^\n]*?(?= \[type=|\n|$)", "check --engine-args, and the checkpoint's config.json"),
    (r"(?:Value|Runtime|Assertion|Key|Type|NotImplemented)Error: [^\n]*", "see the log"),
)
"""Patterns for the causes of a failed start, the surest first, and a remedy for each."""

ENDINGS = (
    OUT_OF_MEMORY,
    (
        r"Worker proc \S+ died unexpectedly \(exit code: -\d+\)|engine core exited unexpectedly",
        "another process ended it, or the machine is out of memory",
    ),
)
"""Patterns for a server that the machine ended. If a request makes an engine core fail, the core reports this
before it exits, so its exit is not called unexpected."""

LINE_BEGINNING = re.compile(r"(?m)^\(\w[^()\n]* pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]\n]*\] ?)?")
KERNELS = re.compile(
    r"(?:Using|Selected) (\w+(?:Kernel|Experts))\b|Using (\w+ attention backend)|(scalegate-kernels [^\n]+)"
)
"""Lines about the kernels that vLLM chose, and all lines of the plugin `scalegate-kernels`."""
MONITORED = "JIT monitor activated"
COMPILED = re.compile(r"(\S[^:\n\]]*?) (?:JIT )?compilation during inference: ([^.(\s]+)")
AUTOTUNED = re.compile(r"Triton autotuning for function ([^,\s]+),")
"""Triton's own line about autotuning, which vLLM's monitor turns on."""


stage_of = functools.partial(last_stage, STAGES)
ending_of = functools.partial(first_failure, ENDINGS)


def failure_of(log: str) -> str | None:
    """Return the cause of a failed start and a remedy, without what vLLM puts before each line."""
    return first_failure(FAILURES, LINE_BEGINNING.sub("", log))


def kernels_in(path: Path) -> tuple[str, ...]:
    """Return the kernels that the log at `path` names and what the plugin says, each once, in their order."""
    try:
        log = path.read_text(errors="replace")
    except OSError:
        return ()
    return tuple(dict.fromkeys(next(filter(None, match.groups())) for match in KERNELS.finditer(log)))


def compilations_in(path: Path) -> Mapping[str, float]:
    """Return the kernels compiled after warm-up according to the log at `path`, as series with labels.

    vLLM names each kernel once, however often it compiles it. The result is empty if vLLM's monitor is not
    on.
    """
    try:
        log = path.read_text(errors="replace")
    except OSError:
        return {}
    found = Counter((match[1].split()[-1].lower(), match[2]) for match in COMPILED.finditer(log))
    found.update(("autotuning", match[1]) for match in AUTOTUNED.finditer(log))
    if not found and MONITORED not in log:
        return {}
    series = {
        f'{COMPILATIONS}{{kind="{kind}",kernel="{kernel}",key=""}}': float(count)
        for (kind, kernel), count in found.items()
    }
    return series or {COMPILATIONS: 0.0}
