"""Serving a checkpoint over the OpenAI-compatible API: what to load, where to answer, for how long.

Not the server itself: that is `serving_check/server`, which knows nothing of checkpoints.
"""

import functools
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layouts.errors import UserError
from ..serving_check.engine.options import EngineOptions
from ..serving_check.options import from_given, takes
from ..serving_check.server.limits import ServerLimits
from ..serving_check.server.run import ServerOptions, run_server
from ..serving_check.server.served_model import ModelDescription, SamplingDefaults

# torch and transformers are imported inside functions here: this process starts the engine's process first,
# and both then import them at the same time instead of one after the other.
if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from ..serving_check.engine.engine import Engine
    from .checkpoints.checkpoint import Checkpoint


@takes(EngineOptions, ServerLimits)
def serve(
    artifact: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    served_model_name: str | None = None,
    revision: str | None = None,
    drain_seconds: float = 30.0,
    chat_template: str | Path | None = None,
    **limits_and_engine_options: Any,
) -> None:
    """Serve `artifact`, a folder or a Hub id of any convention we read, until SIGTERM or SIGINT.

    host:              loopback unless told otherwise; the API is open to all who reach it without `api_key`
    port:              0 takes a free one, which the ready line names
    served_model_name: what clients call the model; None takes `artifact` as it was given
    chat_template:     file with a Jinja template for conversations; None takes the checkpoint's own
    drain_seconds:     on SIGTERM, how long running requests may take to finish
    limits_and_engine_options: the fields of ServerLimits (`serving_check/server/limits.py`) and of
                       EngineOptions (`serving_check/engine/options.py`)
    """
    bounds = {one.name for one in fields(ServerLimits)}
    given = limits_and_engine_options
    limits = from_given(ServerLimits, {name: given[name] for name in given.keys() & bounds})
    options = from_given(EngineOptions, {name: given[name] for name in given.keys() - bounds})
    folder = checkpoint_folder(artifact, revision)
    run_server(
        ServerOptions(host, port, api_key, drain_seconds, limits),
        served_model_name or str(artifact),
        functools.partial(build_engine, folder, options),
        functools.partial(describe, folder, None if chat_template is None else Path(chat_template)),
    )


def checkpoint_folder(artifact: str | Path, revision: str | None) -> Path:
    """Where the checkpoint lies, once it is here: a Hub id is downloaded."""
    folder = Path(artifact).expanduser()
    if folder.is_dir() and revision is None:
        return folder
    from .checkpoints.checkpoint import open_checkpoint

    return open_checkpoint(str(artifact), revision).folder


def build_engine(folder: Path, options: EngineOptions) -> "Engine":
    """Load the model in `folder` and put the engine around it; runs in the engine's process."""
    from ..layouts.kv_format import KV_FORMATS, largest_of
    from ..serving_check.engine.engine import Engine
    from .checkpoints.checkpoint import open_checkpoint
    from .conventions.kv_cache import kv_cache_of
    from .device import resolve_device, resolve_dtype
    from .model_loader.load_model import load_model

    kv_cache = kv_cache_of(open_checkpoint(folder), options.kv_cache_dtype)
    if largest_of(KV_FORMATS[kv_cache.kv_format]) is not None and not kv_cache.scales:
        print("Note: no KV scales in the checkpoint; keys and values are stored unscaled.", file=sys.stderr)
    loaded = load_model(
        folder,
        device=resolve_device(options.device),
        dtype=resolve_dtype(options.dtype),
        layout=options.layout,
        numerics=options.numerics,
    )
    ends = eos_token_ids(loaded.generation_config, loaded.model.config, loaded.tokenizer)
    served = replace(options, kv_cache_dtype=kv_cache.kv_format)
    return Engine(loaded.model, served, ends, kv_cache.scales, loaded.tokenizer)


def describe(folder: Path, chat_template: Path | None = None) -> ModelDescription:
    """What the API process has to know of the model: its tokenizer and its maker's sampling defaults.

    chat_template: a file with one, in place of the tokenizer's own
    """
    from .checkpoints.checkpoint import open_checkpoint
    from .checkpoints.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(str(folder))
    tokenizer = load_tokenizer(checkpoint)
    if chat_template is not None:
        if tokenizer is None:
            raise UserError(f"{folder} has no tokenizer, so a chat template is of no use")
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the chat template cannot be read from {chat_template} ({error})") from error
    return ModelDescription(tokenizer, sampling_defaults(checkpoint))


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
    from ..layouts.outside_files import read_json_object

    path = checkpoint.folder / "generation_config.json"
    return SamplingDefaults.from_generation_config(read_json_object(path) if path.is_file() else {})
