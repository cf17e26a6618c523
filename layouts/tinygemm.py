"""tinygemm, torch's INT4 product on CUDA, with the bytes that torchao calls `tile_packed_to_4d`.

Its kernel reads and dequantizes the whole weight again for every 16 rows of M, so it loses to the unquantized
product from a small M on (pytorch/ao #3496). It is here to be measured beside the others, and to be caught.

    codes           int32 [N'/8, K/16T, 32, T/2]: N' = N padded to 8, T = `inner_k_tiles(K)`
    scale_and_zero  bfloat16 [K/g, N', 2] (`int4_affine.py`)
"""

import torch
from torch import Tensor

from .int4_affine import pad_rows, refuses_format, require_int4, scale_and_zero
from .layout import PackedWeight, Problem, QuantizedWeight

ROW_TILE = 8
K_TILE = 16
INNER_K_TILES = (8, 4, 2)
MIN_CAPABILITY = (8, 0)


class Tinygemm:
    """`_weight_int4pack_mm`: bfloat16, groups of 32 to 256, any N; integer and fractional zeros alike."""

    name = "tinygemm"
    kernel = "tinygemm_m16n8k16_chunk_kernel"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"runs on CUDA, not on {problem.device.type}"
        if torch.cuda.get_device_capability(problem.device) < MIN_CAPABILITY:
            return "needs compute capability 8.0"
        if problem.dtype is not torch.bfloat16:
            return f"takes bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
        return refuses_format(problem)

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        n, k = weight.shape
        padded = pad_rows(weight, ROW_TILE)
        # The converter wants the even k in the high nibble; our format keeps it in the low one.
        high_first = (padded.codes << 4) | (padded.codes >> 4)
        tensors = {
            "codes": torch._convert_weight_to_int4pack(high_first, inner_k_tiles(k)),
            "scale_and_zero": scale_and_zero(padded, torch.bfloat16),
        }
        meta = {"group_size": weight.group_size, "padded_rows": padded.shape[0] - n}
        return PackedWeight(self.name, weight.shape, dtype, tensors, meta)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, meta = packed.tensors, packed.meta
        y = torch._weight_int4pack_mm(x, tensors["codes"], meta["group_size"], tensors["scale_and_zero"])
        return y[:, : packed.shape[0]] if meta["padded_rows"] else y


def inner_k_tiles(k: int) -> int:
    """The most tiles of 16 k that the kernel keeps together: 8 in torchao, fewer for a ragged K."""
    return next(tiles for tiles in INNER_K_TILES if k % (tiles * K_TILE) == 0)
