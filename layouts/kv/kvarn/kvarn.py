"""The KV formats of KVarN: whole pages are normalized and quantized, keys to 4 bits, values to 2 or 4.

A request's first page and its current page stay unquantized, in the request's own row. A query sees these two
pages unquantized and all pages between them quantized, so the result does not depend on how a prompt was cut
into chunks. The arithmetic is in `kernels/attention/kvarn/reference.py`.
"""

from dataclasses import dataclass

import torch

from ....base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from ....base.errors import UserError
from ..layer import KVScales, KVShape, LayerKV, PoolSize, Workspaces, refuse_gpu_head_size
from ..token_by_token import TokenByToken
from .storage import KVarNStorage

HELD_PAGES = 2
"""Unquantized pages of a request: the first one and the current one."""


@dataclass(frozen=True)
class KVarN:
    """Pages of `group_size` tokens. Layers with a sliding window stay unquantized, since they are short."""

    value_bits: int
    group_size: int

    @property
    def name(self) -> str:
        """vLLM's name for the format."""
        return f"kvarn_k4v{self.value_bits}_g{self.group_size}"

    @property
    def plain_tokens(self) -> int:
        return HELD_PAGES * self.group_size

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        if shape.sliding_window is not None:
            return TokenByToken().bytes_per_page(shape, page_size)
        dim = shape.padded().key_dim
        codes = page_size * dim * (4 + self.value_bits) // 8
        return shape.heads * (codes + 3 * (dim + page_size) * torch.float16.itemsize)

    def bytes_per_request(self, shape: KVShape) -> int:
        if shape.sliding_window is not None:
            return 0
        return 2 * self.plain_tokens * shape.heads * shape.padded().key_dim * shape.dtype.itemsize

    def page_size(self, device: torch.device) -> int:
        return self.group_size

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        """On a GPU, decoding and prefill use kernels that sum in different orders, so `per-token` is not
        supported.
        """
        return ("tuned", "pin") if device.type == "cuda" else INVARIANCE_MODES

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        if size.page_size != self.group_size:
            raise UserError(
                f"a page of {self.name} holds {self.group_size} tokens, not {size.page_size}; "
                "leave --page-size out"
            )
        if shape.sliding_window is not None:
            return TokenByToken().allocate(shape, size, device, None, workspaces)
        if device.type == "cuda":
            refuse_gpu_head_size(self.name, shape.padded().key_dim)
        storage = KVarNStorage.allocate(shape.padded(), size, self.value_bits, device)
        # Each imported only where its kernels are needed: a GPU's, or numba, which takes half a second.
        if device.type == "cuda":
            from .cuda import KVarNCudaLayerKV

            return KVarNCudaLayerKV(storage, shape.padded(), size, workspaces)
        from .cpu import KVarNCpuLayerKV

        return KVarNCpuLayerKV(storage, workspaces)
