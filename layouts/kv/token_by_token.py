"""KV formats that store each token by itself, unquantized or in eight bits.

Formats with fewer bits have files of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from .cpu import CpuLayerKV
from .layer import KVScales, KVShape, LayerKV, PerTokenFormat, PoolSize, StoredPages, Workspaces, zeros


@dataclass(frozen=True)
class TokenByToken(PerTokenFormat):
    """Every token of every head is stored by itself, unquantized or in eight bits.

    dtype: None for the model's own dtype. e4m3 has a fixed scale for each head (the checkpoint's, or 1), and
           int8 has a scale for each token and head, which is stored beside the token
    """

    dtype: torch.dtype | None = None

    @property
    def largest(self) -> float | None:
        return torch.finfo(self.dtype).max if self.dtype == torch.float8_e4m3fn else None

    def invariance_modes(self, device: torch.device) -> tuple[BatchInvariance, ...]:
        return INVARIANCE_MODES

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        dtype = self.dtype or shape.dtype
        scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
        return page_size * shape.heads * ((shape.key_dim + shape.value_dim) * dtype.itemsize + scales)

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        dtype = self.dtype or shape.dtype
        on_cuda = device.type == "cuda"
        tokens = (size.page_size, shape.heads)
        pages = (size.num_pages, *(reversed(tokens) if on_cuda else tokens))
        stored = StoredPages(
            zeros((*pages, shape.key_dim), dtype, device),
            zeros((*pages, shape.value_dim), dtype, device),
            self._scale(pages, shape, device, None if scales is None else scales.key),
            self._scale(pages, shape, device, None if scales is None else scales.value),
        )
        if on_cuda:
            # Imported only where there is a GPU to need its kernels.
            from .cuda import CudaLayerKV

            return CudaLayerKV(stored, shape, size, workspaces)
        return CpuLayerKV(stored, workspaces)

    def _scale(
        self, pages: tuple[int, ...], shape: KVShape, device: torch.device, given: Tensor | None
    ) -> Tensor | None:
        if self.dtype == torch.int8:
            return zeros(pages, torch.float32, device)
        if self.dtype == torch.float8_e4m3fn:
            ones = torch.ones(shape.heads, dtype=torch.float32, device=device)
            return ones if given is None else ones * given.to(device, torch.float32).view(-1)
        return None
