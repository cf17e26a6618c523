"""The servers of a validation: their options, and the record of the options in the verdict.

Nothing is started here: each engine (`serving_check/adapters/`) starts its own server. Sizes that were not
given follow from the workload, the same on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from ...base.errors import UserError
from ...base.option_fields import OptionValue, flag, from_given
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.engine import Server, ServerJob
from ...serving_check.adapters.placement import ANYWHERE, Placement
from ...serving_check.engine.options import ARTIFACT_ONLY, AUTO, SIZED, UNQUANTIZED, EngineOptions
from ...serving_check.gate.gate import CANARY_LENGTH, CANARY_PROMPT
from ...serving_check.profiles import PROFILES
from ...serving_check.settings import LONG_PROMPT, WorkloadSettings
from ...serving_check.workload.use_plan import MOST_ANSWER
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..machine.device import resolve_device
from ..records.artifact import Artifact
from .gpu_memory import MemoryPlan, Side

PAGE = 128
"""A multiple of every page size, to which requests are rounded up since their last pages are partly empty."""
LARGEST_CHUNK = 8192
"""The most prompt tokens in a step: activations of more would take memory from keys and values."""
LONG_PROMPT_IN_USE = 4096
"""Tokens of the longest prompt of a load as in use, which shows faults in long contexts."""
TOGETHER_IN_PROFILE = 4
"""How many of a profile's longest requests have room in the KV cache beside the load: 8 to 15 average
ones."""
IN_PROCESS = frozenset({"device", "dtype", "layout"})
"""The options that hold for this process as well: it loads both models to compare them."""
GPUS_OF_A_SERVER = frozenset({"tensor_parallel_size", "pipeline_parallel_size"})
"""The options that say on how many GPUs one server runs."""
TIMES_ITS_FILES = 6
"""Memory for a checkpoint in two processes as a multiple of its files' size: it may be widened to float32."""
BESIDE_WEIGHTS = 4 << 30
"""Bytes for the interpreters, their libraries and the KV caches of four processes."""


def sized_options(
    given: Mapping[str, Any],
    workload: WorkloadSettings,
    longest_task: int = 0,
    context: int | None = None,
) -> EngineOptions:
    """Return the options that are given, and the sizes that the workload, or a task's longest prompt, needs.

    Raise UserError if the servers' context would be too short for the workload.

    context: the longest request that the models accept, in tokens, if known; the workload fits in it
    """
    pool = max(pool_tokens(workload), longest_task)
    length = max(request_tokens(workload), longest_task)
    sizes = max(workload.ms), length if context is None else min(length, context), pool
    needed = dict(zip(SIZED, sizes, strict=True))
    options = from_given(EngineOptions, needed | {k: v for k, v in given.items() if v is not None})
    if options.max_model_len is not None and options.max_model_len < longest_request(workload):
        raise UserError(
            f"--max-model-len {options.max_model_len} is too short for requests of {workload.input_len} + "
            f"{workload.output_len} tokens (at least {longest_request(workload)}); leave it out, or lower "
            "--input-len or --output-len"
        )
    limits = [limit for limit in (context, given.get("max_model_len")) if limit is not None]
    return _with_chunks(options, workload, min(limits, default=None))


def with_long_contexts(
    options: EngineOptions,
    given: Mapping[str, Any],
    context: int | None = None,
    profile: str | None = None,
) -> EngineOptions:
    """Return `options` with room for the longest request of the load as in use, or of a profile of loads,
    beside the others, unless sizes are given.

    context: the longest request that the models accept, in tokens, if known
    """
    longest = LONG_PROMPT_IN_USE + MOST_ANSWER
    if profile is not None:
        longest = max(longest, PROFILES[profile].longest_request)
    wanted = longest // PAGE * PAGE + PAGE
    length = wanted if context is None else min(wanted, context)
    if options.max_model_len is None or options.kv_cache_tokens is None or options.max_model_len >= length:
        return options
    if any(given.get(name) is not None for name in ("max_model_len", "kv_cache_tokens")):
        return options
    beside = length if profile is None else length * TOGETHER_IN_PROFILE
    return replace(options, max_model_len=length, kv_cache_tokens=options.kv_cache_tokens + beside)


def with_recorded_contexts(
    options: EngineOptions,
    given: Mapping[str, Any],
    recorded: Mapping[str, Any],
    profile: str | None = None,
) -> EngineOptions:
    """Return `options` as a recorded run had them: with room for a load as in use if the run had such a
    load.
    """
    length = recorded.get("max_model_len")
    return with_long_contexts(options, given, length, profile) if isinstance(length, int) else options


def _with_chunks(options: EngineOptions, workload: WorkloadSettings, longest: int | None) -> EngineOptions:
    """Return options with prefill chunks large enough that, for long prompts, prefill of all M requests ends
    within a quarter of an answer's steps. With smaller chunks the first requests end before the last begin to
    decode, and M requests never decode together.

    Raise UserError if the largest chunks are not enough for half of the requests.

    longest: the most tokens of a request; None if there is no limit
    """
    if workload.input_len <= LONG_PROMPT:
        return options
    on_gpu = options.device.startswith("cuda") or (options.device == AUTO and torch.cuda.is_available())
    prompts, usual = max(workload.ms) * workload.input_len, options.chunks(on_gpu)
    is_given = options.prefill_chunk is not None or options.chunk_while_decoding is not None
    wanted = usual[1] if is_given else -(-4 * prompts // workload.output_len)
    chunk = max(usual[1], min(wanted, LARGEST_CHUNK))
    if prompts > chunk * workload.output_len / 2:
        output_len = -(-2 * prompts // chunk)
        fits = longest is None or workload.input_len + output_len <= longest
        advice = f"--output-len {output_len}" if fits else "shorter prompts (--input-len)"
        raise UserError(
            f"prefill of {max(workload.ms)} prompts of {workload.input_len} tokens takes "
            f"{-(-prompts // chunk)} steps, and answers have only {workload.output_len} tokens: the first "
            "requests would end before the last requests begin to decode, so M would not be reached. "
            f"Give {advice}, or fewer requests at once (--m)"
        )
    if chunk == usual[1]:
        return options
    return replace(options, prefill_chunk=max(usual[0], chunk), chunk_while_decoding=chunk)


def baseline_options(options: EngineOptions) -> EngineOptions:
    """Return the baseline's options: the artifact's without those that apply to the artifact only."""
    untried = EngineOptions()
    return replace(options, **{name: getattr(untried, name) for name in ARTIFACT_ONLY})


def artifact_options(options: EngineOptions, manifest: Artifact | None) -> EngineOptions:
    """Return the options of the artifact's server: the KV format is named, since other engines cannot read
    every format from the checkpoint."""
    if manifest is None or manifest.kv_cache == UNQUANTIZED or options.kv_cache_dtype != AUTO:
        return options
    return replace(options, kv_cache_dtype=manifest.kv_cache)


def refuse_unreached(given: Mapping[str, Any], engine: str, baseline_engine: str) -> None:
    """Raise UserError if an option was given that applies to no server."""
    ours, theirs = engine_named(engine), engine_named(baseline_engine)
    for name, value in given.items():
        reached = ours.options if name in ARTIFACT_ONLY else ours.options | theirs.options
        if value in (None, AUTO) or name in reached | IN_PROCESS:
            continue
        if ours.starts:
            raise UserError(f"{flag(name)} does not apply to the engine {engine!r}; leave it out")
        raise UserError(
            f"{flag(name)} applies only to a server that Scalegate starts, and {engine} is running already"
        )
    for word, other in ((engine, theirs), (baseline_engine, ours)):
        asked = {name for name in GPUS_OF_A_SERVER if given.get(name) not in (None, 1)}
        alone = list(asked - engine_named(word).options)
        if alone and engine_named(word).starts and other.options.issuperset(alone):
            raise UserError(
                f"{flag(alone[0])} does not apply to the engine {word!r}, so its server would run on fewer "
                "GPUs than the other side's; give both sides an engine that has this option"
            )


def placed(asked: str, placement: Placement) -> str:
    """Return the device on which this process loads both models: the first GPU that is named, or `asked`."""
    device = resolve_device(asked)
    if placement.devices is None:
        return device
    if device != "cuda" and asked == AUTO:
        raise UserError("--devices names GPUs, but PyTorch finds no GPU here")
    if device != "cuda":
        raise UserError(f"--devices and --device {asked} both name a device; leave one of them out")
    return f"cuda:{placement.devices[0]}"


def gpu_name(index: int) -> str:
    """Return the name of a GPU. Raise UserError if there is no such GPU."""
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"there is no GPU {index}: PyTorch finds {count} GPUs here; name others with --devices"
        )
    return torch.cuda.get_device_name(index)


def sides_of(
    wanted: Sequence[tuple[str, str, Checkpoint, EngineOptions]],
    placement: Placement,
    name_of: Callable[[int], str] = gpu_name,
) -> list[Side]:
    """Return the servers with their places. Raise UserError if the named GPUs are of different kinds.

    wanted: the name, engine, checkpoint and options of each server
    """
    device = torch.device(wanted[0][3].device)
    if device.type != "cuda" or placement.on_a_cluster:
        return [Side(*each) for each in wanted]
    groups = placement.groups(len(wanted), first=device.index or 0)
    kinds = {gpu: name_of(gpu) for group in groups for gpu in group}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{gpu}: {kind}" for gpu, kind in sorted(kinds.items()))
        raise UserError(
            f"the servers would run on GPUs of different kinds ({named}), whose difference would count as "
            "a difference between the models; name GPUs of one kind with --devices"
        )
    return [
        Side(*each, devices=group if engine_named(each[1]).starts else ())
        for each, group in zip(wanted, groups, strict=True)
    ]


def has_room(sides: Sequence[Side]) -> bool:
    """Say whether all models fit in memory twice at the same time: in this process and in their servers.

    On a GPU the result is always false: memory for this process is not planned there (`gpu_memory.py`).
    """
    if not all(side.options.device.startswith("cpu") for side in sides):
        return False
    files = [file for side in sides for file in side.checkpoint.folder.glob("*.safetensors")]
    needed = TIMES_ITS_FILES * sum(path.stat().st_size for path in files) + BESIDE_WEIGHTS
    return psutil.virtual_memory().available > needed


def may_start_at_once(sides: Sequence[Side], plan: MemoryPlan) -> bool:
    """Say whether servers on GPUs leave each other's start alone.

    vLLM and SGLang measure the free memory of a GPU while they start, and fail or take too much if that
    changes meanwhile; vLLM does not if it is given its KV cache size in bytes. Our engine keeps to the number
    of tokens that it is given.
    """
    measuring = [side for side in sides if _measures(side, plan)]
    disturbed = any(
        set(side.devices) & set(other.devices) for side in measuring for other in sides if other is not side
    )
    return all(side.devices for side in sides) and not disturbed


def _measures(side: Side, plan: MemoryPlan) -> bool:
    engine, grant = engine_named(side.engine), plan.grants[side.name]
    told = engine.takes_kv_cache_bytes and grant is not None and grant.kv_cache_bytes is not None
    return not engine.packs_with_layouts and not told


def server_of(job: ServerJob) -> Server:
    """Return the server of a job, not yet started; it serves the job's folder unless the engine is a URL."""
    return engine_named(job.engine).server(job)


def recorded_options(
    engine: str,
    checkpoint: Checkpoint,
    options: EngineOptions,
    dtype: str,
    placement: Placement = ANYWHERE,
) -> dict[str, OptionValue] | None:
    """Return the options with which the server of `checkpoint` was started, with `auto` resolved; None if it
    was not started here.

    Of the placement, only the options that were given are included.

    dtype: the dtype in which `checkpoint` was loaded
    """
    kind = engine_named(engine)
    if not kind.starts:
        return None
    effective = effective_options(options) | {"dtype": dtype} | placement.asked_for()
    if kind.packs_with_layouts:
        effective["kv_cache_dtype"] = kv_cache_of(checkpoint, options.kv_cache_dtype).kv_format
    return {name: value for name, value in effective.items() if name in kind.options}


def effective_options(options: EngineOptions) -> dict[str, OptionValue]:
    """Return every option with the value that the engine uses on its device, if that is known beforehand."""
    chunk, while_decoding = options.chunks(options.device.startswith("cuda"))
    return options.to_json() | {"prefill_chunk": chunk, "chunk_while_decoding": while_decoding}


def longest_request(workload: WorkloadSettings) -> int:
    """Return the tokens of the longest request that is sent, prompt and answer."""
    return max(workload.input_len + workload.output_len, CANARY_PROMPT + CANARY_LENGTH)


def request_tokens(workload: WorkloadSettings) -> int:
    """Return the longest request that is sent, rounded up to whole pages."""
    return (longest_request(workload) // PAGE + 1) * PAGE


def pool_tokens(workload: WorkloadSettings) -> int:
    """Return the KV pool of both servers: room for the largest M of such requests."""
    return max(workload.ms) * request_tokens(workload)
