"""What a layer's storage of keys and values is, for any KV format: its contract, and its sizes.

`format.py` registers the particular formats.
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
from ...kernels.attention.options import AttentionOptions
from .attention_metadata import AttentionMetadata

T = TypeVar("T")
LEAST_GPU_DIM = 16
CPU_PAGE, CUDA_PAGE = 16, 64
"""Number of tokens in a page, for formats that store each token by itself."""
LEAST_CODED_DIM, LARGEST_CODED_DIM = 64, 256


@dataclass(frozen=True)
class KVShape:
    """The shape of a layer's keys and values, and the number of query heads that attend to them."""

    heads: int
    """Number of heads of keys and of values."""
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    query_heads: int
    sliding_window: int | None = None
    """How many keys a query of this layer sees; None if it sees all."""

    def on(self, device: torch.device) -> "KVShape":
        """Return the shape as stored on `device`. GPU kernels need one power of two for keys and values:
        DeepSeek's 192 and 128 become 256 each."""
        return self.padded() if device.type == "cuda" else self

    def padded(self) -> "KVShape":
        """Return the shape with keys and values padded to one power of two, as kernels and rotations need."""
        dim = 1 << (max(self.key_dim, self.value_dim, LEAST_GPU_DIM) - 1).bit_length()
        return replace(self, key_dim=dim, value_dim=dim)


@dataclass(frozen=True)
class KVScales:
    """The scales by which a layer's keys and values are divided before they are stored."""

    key: Tensor
    """fp32 [1] for all heads, or [H_kv]."""
    value: Tensor


@dataclass(frozen=True)
class PoolSize:
    """The sizes that determine every layer's storage."""

    num_pages: int
    page_size: int
    """Number of tokens in a page."""
    max_requests: int
    """Number of requests that can have a row at the same time. Row `max_requests` is for padding."""
    max_pages: int
    """Number of pages that one request can have: the width of a block table."""


class PerTokenFormat:
    """The base of KV formats that store each token by itself: fixed page sizes, nothing besides pages."""

    def bytes_per_request(self, shape: KVShape) -> int:
        return 0

    def page_size(self, device: torch.device) -> int:
        return CUDA_PAGE if device.type == "cuda" else CPU_PAGE

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        """On a GPU, decoding and prefill use different kernels, so `per-token` is not supported."""
        return ("tuned", "pin") if device.type == "cuda" else INVARIANCE_MODES


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take no CPU memory until they are written: torch.zeros writes every byte, calloc
    none.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def widened(x: Tensor, head_dim: int) -> Tensor:
    """Pad x [T, H, D] with zeros to [T, H, head_dim]: zeros add nothing to a product."""
    return x if x.shape[2] == head_dim else functional.pad(x, (0, head_dim - x.shape[2]))


def by_token(x: Tensor) -> Tensor:
    """Return x [T, H, D] with each token's heads contiguous, as GPU kernels read them."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


def refuse_gpu_head_size(name: str, dim: int) -> None:
    """Raise UserError if the kernels for fewer than eight bits do not support heads of `dim` channels."""
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
        """Return the workspace for `key`; `make` makes it for the first layer that asks."""
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
        """Store this step's keys and values, and attend over all stored keys and values.

        Attend for query [T, H, D] with key [T, H_kv, D] and value [T, H_kv, D_v]; return [T, H, D_v]. Padding
        tokens are not stored; their output must be finite. Inside a CUDA graph (`metadata.host` is None)
        nothing may depend on the host.

        The method must attend over keys and values as they are stored, never over the originals: then the
        output does not depend on how a prompt was cut into chunks, nor on whether a request was preempted.
        """


@dataclass(frozen=True)
class StoredPages:
    """One layer's keys and values with their scales, in the order of dimensions that the device needs.

    The order is [pages, P, H_kv, D] on the CPU, with scales [H_kv] or [pages, P, H_kv]; on CUDA H_kv comes
    before P.
    """

    key_pages: Tensor
    value_pages: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
