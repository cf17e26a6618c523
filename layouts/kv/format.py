"""The KV formats: how keys and values are stored in pages, how much memory that takes, and who serves it.

Not for which request owns which page; that is the engine's KV pool.
"""

from typing import Protocol, runtime_checkable

import torch

from ...base.batch_invariance import BatchInvariance
from ...base.errors import UserError
from ...base.registry import Registry
from .int4 import Int4PerTokenHead
from .kvarn.kvarn import KVarN
from .layer import KVScales, KVShape, LayerKV, PoolSize, Workspaces
from .nvfp4 import NVFP4KV
from .token_by_token import TokenByToken


class KVFormat(Protocol):
    """How tokens' keys and values are stored. A request has pages, and a row of its own while it runs."""

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        """What one page of `page_size` tokens takes in one layer."""

    def bytes_per_request(self, shape: KVShape) -> int:
        """What one layer keeps for each row beside the pages: tokens not quantized yet, or never."""

    def page_size(self, device: torch.device) -> int:
        """Tokens a page holds, unless the engine is told otherwise."""

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        """Storage for one layer. What it holds at first must be finite: masked keys are still multiplied.

        scales: the checkpoint's, where it has any. workspaces: scratch memory to share with other layers
        """


@runtime_checkable
class ScaledKVFormat(KVFormat, Protocol):
    """A format that may divide keys and values by scales that never change, which a text has shown."""

    @property
    def largest(self) -> float | None:
        """The largest magnitude that it holds at a scale of 1; None where it has no such scales."""


@runtime_checkable
class PageCodedKVFormat(KVFormat, Protocol):
    """A format that keeps tokens as they came until a page of them is full, which it codes at once."""

    @property
    def group_size(self) -> int:
        """Tokens that are coded at once."""

    @property
    def plain_tokens(self) -> int:
        """The longest context without a code."""


@runtime_checkable
class InvariantKVFormat(KVFormat, Protocol):
    """A format whose attention can keep a request's bits whoever shares its batch."""

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        """What it keeps on this kind of device, `tuned` included."""


def require_batch_invariance(name: str, mode: BatchInvariance, device: torch.device) -> None:
    """UserError where keys and values of this format cannot be attended over as the mode asks."""

    def keeps(kv_format: KVFormat) -> bool:
        kept = kv_format.invariance_modes(device) if isinstance(kv_format, InvariantKVFormat) else ("tuned",)
        return mode in kept

    if not keeps(KV_FORMATS[name]):
        able = ", ".join(format_name for format_name, kv_format in KV_FORMATS.items() if keeps(kv_format))
        raise UserError(
            f"{name} keys and values are not batch-invariant as {mode!r} asks; choose one of: {able} "
            "(--kv-cache-dtype), or --batch-invariance tuned"
        )


def largest_of(kv_format: KVFormat) -> float | None:
    """What `kv_format` holds at a scale of 1; None for a format without scales that never change."""
    return kv_format.largest if isinstance(kv_format, ScaledKVFormat) else None


KV_FORMATS: Registry[KVFormat] = Registry("KV format")
KV_FORMATS.add("unquantized", TokenByToken())
KV_FORMATS.add("fp8", TokenByToken(torch.float8_e4m3fn))
KV_FORMATS.add("int8_per_token_head", TokenByToken(torch.int8))
KV_FORMATS.add("int4_per_token_head", Int4PerTokenHead())
KV_FORMATS.add("nvfp4", NVFP4KV())
for _value_bits in (2, 4):
    for _group_size in (128, 64):
        _kvarn = KVarN(_value_bits, _group_size)
        KV_FORMATS.add(_kvarn.name, _kvarn)
