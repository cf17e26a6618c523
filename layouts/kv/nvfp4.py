"""The KV format nvfp4: E2M1 codes, an E4M3 scale per 16 channels of a token, a fixed scale per head.

The arithmetic is in `kernels/attention/per_token/nvfp4.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention.per_token import nvfp4
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


@dataclass(frozen=True, eq=False)
class NVFP4Code:
    """Keys or values of `dim` channels in NVFP4. The stored parts are words, int16, and scales, E4M3."""

    dim: int
    head_scale: Tensor
    """The fixed scale of each head, fp32 [H_kv]."""

    def allocate(self, pages: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        words = zeros((*pages, self.dim // 4), torch.int16, device)
        return words, zeros((*pages, self.dim // nvfp4.GROUP_SIZE), torch.float8_e4m3fn, device)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        stored = nvfp4.quantize_reference(x, self.head_scale)
        return stored.words, stored.scales

    def dequantize(self, parts: tuple[Tensor, ...]) -> Tensor:
        return nvfp4.dequantize_reference(nvfp4.NVFP4Tokens(*parts), self.head_scale)


@dataclass(frozen=True)
class NVFP4KV(PerTokenFormat):
    """Keys and values in NVFP4, with the checkpoint's scales for 4-bit floats, or 1 if it has none."""

    @property
    def largest(self) -> float:
        return nvfp4.E2M1_MAX * nvfp4.E4M3_MAX

    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        dim = shape.padded().key_dim
        return page_size * shape.heads * 2 * (dim // 2 + dim // nvfp4.GROUP_SIZE)

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> LayerKV:
        shape = shape.padded()
        dim, ones = shape.key_dim, torch.ones(shape.heads, dtype=torch.float32, device=device)
        given = (1.0, 1.0) if scales is None else (scales.key, scales.value)
        codes = NVFP4Code(dim, _by_head(ones, given[0])), NVFP4Code(dim, _by_head(ones, given[1]))
        if device.type == "cuda":
            refuse_gpu_head_size("nvfp4", dim)
            # Imported only where there is a GPU to need its kernels.
            from ...kernels.attention.per_token.store import TokenPages
            from .coded_cuda import CodedCudaLayerKV
            from .cuda import refuse_without_e4m3

            refuse_without_e4m3(device, "nvfp4", "int4_per_token_head")
            on_gpu = (size.num_pages, shape.heads, size.page_size)
            words_and_scales = [code.allocate(on_gpu, device) for code in codes]
            sides = [
                TokenPages(words, scales, code.head_scale)
                for (words, scales), code in zip(words_and_scales, codes, strict=True)
            ]
            return CodedCudaLayerKV(
                sides[0], sides[1], rotated=False, shape=shape, size=size, workspaces=workspaces
            )
        pages = (size.num_pages, size.page_size, shape.heads)
        return CodedCpuLayerKV(codes, pages, rotated=False, workspaces=workspaces)


def _by_head(ones: Tensor, given: Tensor | float) -> Tensor:
    """Return fp32 [H_kv], from one scale for all heads or one for each head."""
    return ones * (given.to(ones.device, torch.float32).view(-1) if isinstance(given, Tensor) else given)
