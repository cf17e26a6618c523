"""One layer's keys and values as the engine sees them: the contract of their storage, and its sizes.

Not for any one format; those are in `kv_format.py`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from ...base.errors import UserError
from ...kernels.attention.reference import AttentionOptions
from .attention_metadata import AttentionMetadata

T = TypeVar("T")
LEAST_GPU_DIM = 16
CPU_PAGE, CUDA_PAGE = 16, 64
"""Tokens a page holds where every token is stored by itself."""
LEAST_CODED_DIM, LARGEST_CODED_DIM = 64, 256


@dataclass(frozen=True)
class KVShape:
    """The key and value of one token in one layer, and the number of query heads that attend to them."""

    heads: int
    """Of keys and values."""
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    query_heads: int
    sliding_window: int | None = None
    """Keys that a query of this layer sees; None sees all."""

    def on(self, device: torch.device) -> "KVShape":
        """As stored on `device`: GPU kernels want one power of two for keys and values alike, so DeepSeek's
        192 and 128 take 256 each."""
        return self.padded() if device.type == "cuda" else self

    def padded(self) -> "KVShape":
        """Keys and values of one power of two, which kernels and rotations want."""
        dim = 1 << (max(self.key_dim, self.value_dim, LEAST_GPU_DIM) - 1).bit_length()
        return replace(self, key_dim=dim, value_dim=dim)


@dataclass(frozen=True)
class KVScales:
    """What one layer's keys and values are divided by before e4m3 holds them."""

    key: Tensor
    """fp32 [1] for all heads, or [H_kv]."""
    value: Tensor


@dataclass(frozen=True)
class PoolSize:
    """How much every layer's storage holds."""

    num_pages: int
    page_size: int
    """Tokens a page holds."""
    max_requests: int
    """Requests that have a row at the same time; row `max_requests` belongs to none, and pads batches."""
    max_pages: int
    """Pages that one request can have: the width of a block table."""


class PerTokenFormat:
    """What KV formats share that store every token by itself: pages of one size, nothing beside them."""

    def bytes_per_request(self, shape: KVShape) -> int:
        return 0

    def page_size(self, device: torch.device) -> int:
        return CUDA_PAGE if device.type == "cuda" else CPU_PAGE

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        """On a GPU codes are decoded by one kernel and read for a prompt by another."""
        return ("tuned", "pin") if device.type == "cuda" else INVARIANCE_MODES


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no CPU memory until they are written: torch.zeros touches every byte, calloc none."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def widened(x: Tensor, head_dim: int) -> Tensor:
    """x [T, H, D] padded with zeros to [T, H, head_dim]: they add nothing to a product."""
    return x if x.shape[2] == head_dim else functional.pad(x, (0, head_dim - x.shape[2]))


def by_token(x: Tensor) -> Tensor:
    """x [T, H, D] with each token's heads contiguous, as GPU kernels read them."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


def refuse_gpu_head_size(name: str, dim: int) -> None:
    """UserError where kernels for codes below eight bits cannot take heads of `dim` channels."""
    if not LEAST_CODED_DIM <= dim <= LARGEST_CODED_DIM:
        raise UserError(
            f"{name} keys and values are served on a GPU for heads of {LEAST_CODED_DIM} to "
            f"{LARGEST_CODED_DIM} channels, not {dim}; use fp8 or int8_per_token_head"
        )


class Workspaces:
    """Scratch memory that layers of a pool share, since they run one after another."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` made for the first layer that asked for `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class LayerKV(Protocol):
    """One layer's storage in one format, with the workspace that its attention needs."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store this step's keys and values, and attend over all that is stored.

        query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v] → [T, H, D_v], finite for padding tokens, of
        which nothing is stored. Inside a CUDA graph (`metadata.host` is None) nothing may depend on the host.

        Attends over what is stored, never over what it was made from: then no output depends on how a prompt
        was cut into chunks, nor on whether a request was preempted.
        """


@dataclass(frozen=True)
class StoredPages:
    """One layer's keys and values with their scales, in the order of dimensions that the device wants.

    On the CPU [pages, P, H_kv, D] with scales [H_kv] or [pages, P, H_kv]; on CUDA H_kv before P.
    """

    key_pages: Tensor
    value_pages: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
