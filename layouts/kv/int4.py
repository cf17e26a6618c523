"""The KV format int4_per_token_head: rotated channels in four bits, a scale and a zero per token and head.

The arithmetic is in `kernels/attention/per_token/int4.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention.per_token import int4
from .coded_cpu import CodedCpuLayerKV
from .layer import (
    KVScales,
    KVShape,
    LayerKV,
    PerTokenFormat,
    PoolSize,
    Workspaces,
    refuse_gpu_head_size,
    zeros,
)

SCALES_PER_TOKEN = 2


@dataclass(frozen=True)
class Int4Code:
    """Keys or values of `dim` channels in four bits. The stored parts are words, int16, and scales, fp16."""

    dim: int

    def allocate(self, pages: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        words = zeros((*pages, self.dim // 4), torch.int16, device)
        return words, zeros((*pages, SCALES_PER_TOKEN), torch.float16, device)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        stored = int4.quantize_reference(x)
        return stored.words, stored.scales

    def dequantize(self, parts: tuple[Tensor, ...]) -> Tensor:
        return int4.dequantize_reference(int4.Int4Tokens(*parts))


@dataclass(frozen=True)
class Int4PerTokenHead(PerTokenFormat):
    """Keys and values in four bits, each token and head by itself.

    Keys and values are multiplied by a Hadamard matrix first: otherwise a few large channels would cost the
    others their precision.
    """

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        dim = shape.padded().key_dim
        scales = SCALES_PER_TOKEN * torch.float16.itemsize
        return page_size * shape.heads * 2 * (dim // 2 + scales)

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        shape = shape.padded()
        code = Int4Code(shape.key_dim)
        if device.type == "cuda":
            refuse_gpu_head_size("int4_per_token_head", shape.key_dim)
            # Imported only where there is a GPU to need its kernels.
            from ...kernels.attention.per_token.store import TokenPages
            from .coded_cuda import CodedCudaLayerKV

            on_gpu = (size.num_pages, shape.heads, size.page_size)
            sides = [TokenPages(*code.allocate(on_gpu, device)) for _ in range(2)]
            return CodedCudaLayerKV(
                sides[0], sides[1], rotated=True, shape=shape, size=size, workspaces=workspaces
            )
        pages = (size.num_pages, size.page_size, shape.heads)
        return CodedCpuLayerKV((code, code), pages, rotated=True, workspaces=workspaces)
