"""What a KV format is, and the registry of KV formats.

The engine's KV pool decides which request owns which page.
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
    """How keys and values are stored: in a request's pages, and in its own row while it runs."""

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        """Return the size of a page of `page_size` tokens in one layer."""

    def bytes_per_request(self, shape: KVShape) -> int:
        """Return the bytes that one layer stores for each row besides pages: tokens that are not quantized
        yet, and tokens that never are.
        """

    def page_size(self, device: torch.device) -> int:
        """Number of tokens in a page, unless the engine's options set another."""

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        """Storage for one layer. The storage's initial content must be finite, since masked keys are still
        multiplied.

        scales: the checkpoint's, if it has any. workspaces: scratch memory shared with other layers
        """


@runtime_checkable
class ScaledKVFormat(KVFormat, Protocol):
    """A format that may divide keys and values by fixed scales, found by calibration."""

    @property
    def largest(self) -> float | None:
        """Return the largest magnitude that the format can store at a scale of 1; None if it has no fixed
        scales.
        """


@runtime_checkable
class PageCodedKVFormat(KVFormat, Protocol):
    """A format that stores tokens unquantized until their page is full, then quantizes the whole page."""

    @property
    def group_size(self) -> int:
        """Number of tokens that are quantized together."""

    @property
    def plain_tokens(self) -> int:
        """The longest context that has no quantized tokens."""


@runtime_checkable
class InvariantKVFormat(KVFormat, Protocol):
    """A format whose attention can be batch-invariant."""

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        """Return the modes that the format supports on this kind of device, including `tuned`."""


def require_batch_invariance(name: str, mode: BatchInvariance, device: torch.device) -> None:
    """Raise UserError if the KV format `name` does not support the mode on this device."""

    def keeps(kv_format: KVFormat) -> bool:
        kept = kv_format.invariance_modes(device) if isinstance(kv_format, InvariantKVFormat) else ("tuned",)
        return mode in kept

    if not keeps(KV_FORMATS[name]):
        able = ", ".join(format_name for format_name, kv_format in KV_FORMATS.items() if keeps(kv_format))
        raise UserError(
            f"{name} keys and values are not batch-invariant under {mode!r}; choose one of: {able} "
            "(--kv-cache-dtype), or --batch-invariance tuned"
        )


def largest_of(kv_format: KVFormat) -> float | None:
    """Return the largest magnitude that `kv_format` stores at a scale of 1; None if it has no fixed
    scales.
    """
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
