"""Every option of an engine, defined once.

The command lines of `serve`, `validate` and `release`, the arguments of a server's process, the Python
signatures and the verdict's record are all made from these fields: a new option is added here only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import get_args

from ...base.batch_invariance import INVARIANCE_MODES, TUNED, BatchInvariance
from ...base.option_fields import OptionValue, check_options, option
from .jit_monitor import Mode

AUTO, UNQUANTIZED = "auto", "unquantized"
SIZED = ("max_num_seqs", "max_model_len", "kv_cache_tokens")
"""Options that `validate` and `release` derive from the workload unless they are given."""
ARTIFACT_ONLY = ("layout", "kv_cache_dtype", "batch_invariance")
"""Options that `validate` applies to the artifact and not to its baseline."""
DTYPES = (AUTO, "bfloat16", "float16", "float32")

CPU_CHUNK, CUDA_CHUNK = 2048, 8192
"""Number of prompt tokens in a step without decoding requests."""
CPU_CHUNK_WHILE_DECODING, CUDA_CHUNK_WHILE_DECODING = 512, 256
"""The same in a step with decoding requests. On a GPU it is about as much work as decoding a full batch."""


# The registries import torch, which takes seconds, so they are imported only when choices are needed.
def _layouts() -> Iterable[str]:
    from ...layouts.packing.all_layouts import LAYOUTS

    return LAYOUTS


def _kv_formats() -> Iterable[str]:
    from ...layouts.kv.format import KV_FORMATS

    return [AUTO, *KV_FORMATS]


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine. An illegal value raises UserError."""

    device: str = option(AUTO, "Device to run on: auto, cpu, cuda or cuda:N.")
    dtype: str = option(
        AUTO,
        "Type of activations and unquantized weights; auto means the checkpoint's own type.",
        choices=lambda: DTYPES,
    )
    layout: str | None = option(
        None, "One layout for every quantized layer, instead of the layout plan.", choices=_layouts
    )
    batch_invariance: BatchInvariance = option(  # noqa: RUF009
        TUNED,
        "What the bits of a request may depend on: its batch (tuned, the fastest), its own tokens and which "
        "of them were decoded (pin), or its own tokens alone (per-token).",
        choices=lambda: INVARIANCE_MODES,
    )
    max_num_seqs: int = option(128, "The most requests that decode together.", minimum=1)
    max_model_len: int | None = option(
        None, "The longest request, prompt plus output, in tokens; by default the model's context.", minimum=2
    )
    kv_cache_dtype: str = option(
        AUTO,
        "Format of keys and values; auto means the format that the checkpoint declares.",
        choices=_kv_formats,
    )
    page_size: int | None = option(
        None, "Tokens of a KV page; the default suits the KV format and the device.", minimum=1
    )
    kv_cache_tokens: int | None = option(
        None, "Tokens that the KV pool holds; by default as many as fit.", minimum=1
    )
    prefill_chunk: int | None = option(
        None,
        f"The most prompt tokens prefilled in one step; by default {CPU_CHUNK}, on a GPU {CUDA_CHUNK}, and "
        f"{CPU_CHUNK_WHILE_DECODING} or {CUDA_CHUNK_WHILE_DECODING} while other requests decode.",
        minimum=1,
    )
    chunk_while_decoding: int | None = option(
        None,
        "The most prompt tokens prefilled in a step that also decodes; for the default see --prefill-chunk.",
        minimum=1,
    )
    decode_buckets: tuple[int, ...] | None = option(
        None, "Batch sizes that decode steps are padded to; the default depends on the device.", minimum=1
    )
    compiled: bool = option(
        True, "Fuse small operations, and the products of layers that share an input, on a GPU."
    )
    overlapped: bool = option(True, "Launch a step while the host still handles the previous step, on a GPU.")
    jit_monitor: Mode = option(  # noqa: RUF009
        "warn",
        "What a compilation after warm-up leads to: nothing (off), a log line and a count (warn), or the end "
        "of the server (error).",
        choices=lambda: get_args(Mode),
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def kv_format(self) -> str:
        """Return the name in `KV_FORMATS`. `auto` means unquantized here: if a checkpoint declares a format,
        that format has replaced `auto` already.
        """
        return UNQUANTIZED if self.kv_cache_dtype == AUTO else self.kv_cache_dtype

    def chunks(self, on_gpu: bool) -> tuple[int, int]:
        """Return the most prompt tokens in a step without decoding requests, and in a step with them."""
        chunk, while_decoding = CPU_CHUNK, CPU_CHUNK_WHILE_DECODING
        if on_gpu:
            chunk, while_decoding = CUDA_CHUNK, CUDA_CHUNK_WHILE_DECODING
        if self.prefill_chunk is not None:
            chunk = while_decoding = self.prefill_chunk
        return chunk, min(chunk, self.chunk_while_decoding or while_decoding)

    def to_json(self) -> dict[str, OptionValue]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
