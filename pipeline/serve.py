"""Serving a checkpoint over the OpenAI-compatible API: what to load, where to answer, for how long.

Not the server itself: that is `serving_check/server`, which knows nothing of checkpoints.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from ..layouts.errors import UserError
from ..serving_check.engine.request import EngineConfig
from ..serving_check.server.run import ServerOptions, run_server
from ..serving_check.server.served_model import ModelDescription, SamplingDefaults
from .checkpoint import Checkpoint, open_checkpoint, read_json_object
from .load import load_model, load_tokenizer

if TYPE_CHECKING:
    from ..serving_check.engine.engine import Engine

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ModelOptions:
    """What the engine's process loads; picklable."""

    checkpoint: Path
    device: str
    dtype: str = "auto"
    """A key of DTYPES; auto is the checkpoint's own."""
    layout: str | None = None
    """One layout for every quantized layer, whatever the artifact's plan says."""


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
    kv_cache_tokens: int | None = None,
    prefill_chunk: int = 512,
    revision: str | None = None,
    drain_seconds: float = 30.0,
) -> None:
    """Serve `artifact`, a folder or a Hub id of any convention we read, until SIGTERM or SIGINT.

    host:              loopback unless told otherwise; the API is open to all who reach it without `api_key`
    port:              0 takes a free one, which the ready line names
    served_model_name: what clients call the model; None takes `artifact` as it was given
    device:            `auto` is CUDA where there is one
    dtype:             of activations and unquantized weights; a key of DTYPES
    layout:            one layout for every quantized layer; None takes the artifact's plan
    """
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose one of: {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(str(artifact), revision)
    options = ModelOptions(checkpoint.folder, resolve_device(device), dtype, layout)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        prefill_chunk=prefill_chunk,
    )
    defaults = sampling_defaults(checkpoint)
    for setting in defaults.not_applied:
        print(
            f"Note: generation_config.json asks for {setting}; this server does not apply it.",
            file=sys.stderr,
        )
    run_server(
        ServerOptions(host, port, api_key, drain_seconds),
        ModelDescription(
            name=served_model_name or str(artifact),
            load_tokenizer=functools.partial(load_tokenizer, checkpoint),
            defaults=defaults,
        ),
        functools.partial(build_engine, options, config),
    )


def build_engine(options: ModelOptions, config: EngineConfig) -> "Engine":
    """Load the model and put the engine around it; runs in the engine's process."""
    from ..serving_check.engine.engine import Engine

    loaded = load_model(
        options.checkpoint, device=options.device, dtype=DTYPES[options.dtype], layout=options.layout
    )
    ends = eos_token_ids(loaded.generation_config, loaded.model.config, loaded.tokenizer)
    return Engine(loaded.model, config, ends)


def eos_token_ids(
    generation: GenerationConfig, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Every token that ends a sequence: the generation config's, else the model's; and the tokenizer's."""
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    listed = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        listed.append(tokenizer.eos_token_id)
    return frozenset(listed)


def resolve_device(device: str) -> str:
    """`auto` made concrete, anything else checked."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}; give cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that PyTorch can use; give --device cpu")
    return device


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """What the checkpoint's maker recommends, from `generation_config.json`."""
    path = checkpoint.folder / "generation_config.json"
    return SamplingDefaults.from_generation_config(read_json_object(path) if path.is_file() else {})
