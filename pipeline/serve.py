"""Serving a checkpoint over the OpenAI-compatible API: what to load, where to answer, for how long.

Not the server itself: that is `serving_check/server`, which knows nothing of checkpoints.
"""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..serving_check.engine.jit_monitor import Mode
from ..serving_check.engine.request import EngineConfig
from ..serving_check.server.run import ServerOptions, run_server
from ..serving_check.server.served_model import ModelDescription, SamplingDefaults

# torch and transformers are imported inside functions here: this process starts the engine's process first,
# and both then import them at the same time instead of one after the other.
if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from ..serving_check.engine.engine import Engine
    from .checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelOptions:
    """What the engine's process loads; picklable."""

    folder: Path
    device: str = "auto"
    dtype: str = "auto"
    """A name in `device.py`; auto is the checkpoint's own."""
    layout: str | None = None
    """One layout for every quantized layer, whatever the artifact's plan says."""
    kv_cache_dtype: str = "auto"
    """How keys and values are stored; auto is what the checkpoint declares."""


def serve(
    artifact: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    served_model_name: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    layout: str | None = None,
    max_num_seqs: int = 128,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_tokens: int | None = None,
    prefill_chunk: int | None = None,
    jit_monitor: Mode = "warn",
    revision: str | None = None,
    drain_seconds: float = 30.0,
) -> None:
    """Serve `artifact`, a folder or a Hub id of any convention we read, until SIGTERM or SIGINT.

    host:              loopback unless told otherwise; the API is open to all who reach it without `api_key`
    port:              0 takes a free one, which the ready line names
    served_model_name: what clients call the model; None takes `artifact` as it was given
    device:            `auto` is CUDA where there is one
    dtype:             of activations and unquantized weights; a name in `device.py`
    layout:            one layout for every quantized layer; None takes the artifact's plan
    kv_cache_dtype:    a name in `layouts/kv_format.py`; `auto` is what the checkpoint declares
    jit_monitor:       on a compilation after warm-up, `warn` logs and counts it, `error` ends the server
    """
    folder = checkpoint_folder(artifact, revision)
    name = served_model_name or str(artifact)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        prefill_chunk=prefill_chunk,
        jit_monitor=jit_monitor,
    )
    run_server(
        ServerOptions(host, port, api_key, drain_seconds),
        name,
        functools.partial(build_engine, ModelOptions(folder, device, dtype, layout, kv_cache_dtype), config),
        functools.partial(describe, folder),
    )


def checkpoint_folder(artifact: str | Path, revision: str | None) -> Path:
    """Where the checkpoint lies, once it is here: a Hub id is downloaded."""
    folder = Path(artifact).expanduser()
    if folder.is_dir() and revision is None:
        return folder
    from .checkpoints.checkpoint import open_checkpoint

    return open_checkpoint(str(artifact), revision).folder


def build_engine(options: ModelOptions, config: EngineConfig) -> "Engine":
    """Load the model and put the engine around it; runs in the engine's process."""
    from ..serving_check.engine.engine import Engine
    from .checkpoints.checkpoint import open_checkpoint
    from .checkpoints.kv_cache import FP8, kv_cache_of
    from .device import resolve_device, resolve_dtype
    from .model_loader.load_model import load_model

    kv_cache = kv_cache_of(open_checkpoint(options.folder), options.kv_cache_dtype)
    if kv_cache.kv_format == FP8 and not kv_cache.scales:
        print("Note: no KV scales in the checkpoint; keys and values are stored unscaled.", file=sys.stderr)
    loaded = load_model(
        options.folder,
        device=resolve_device(options.device),
        dtype=resolve_dtype(options.dtype),
        layout=options.layout,
    )
    ends = eos_token_ids(loaded.generation_config, loaded.model.config, loaded.tokenizer)
    return Engine(loaded.model, replace(config, kv_cache_dtype=kv_cache.kv_format), ends, kv_cache.scales)


def describe(folder: Path) -> ModelDescription:
    """What the API process has to know of the model: its tokenizer and its maker's sampling defaults."""
    from .checkpoints.checkpoint import open_checkpoint
    from .model_loader.load_model import load_tokenizer

    checkpoint = open_checkpoint(str(folder))
    defaults = sampling_defaults(checkpoint)
    for setting in defaults.not_applied:
        print(
            f"Note: generation_config.json asks for {setting}; not applied by this server.", file=sys.stderr
        )
    return ModelDescription(load_tokenizer(checkpoint), defaults)


def eos_token_ids(
    generation: "GenerationConfig", config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None"
) -> frozenset[int]:
    """Every token that ends a sequence: the generation config's, else the model's; and the tokenizer's."""
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    listed = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        listed.append(tokenizer.eos_token_id)
    return frozenset(listed)


def sampling_defaults(checkpoint: "Checkpoint") -> SamplingDefaults:
    """What the checkpoint's maker recommends, from `generation_config.json`."""
    from .checkpoints.checkpoint import read_json_object

    path = checkpoint.folder / "generation_config.json"
    return SamplingDefaults.from_generation_config(read_json_object(path) if path.is_file() else {})
