"""tinygemm: torch's INT4 product on CUDA, whose byte layout torchao calls `tile_packed_to_4d`.

The kernel reads and dequantizes the whole weight again for every 16 rows of x, so it is slower than the
unquantized product from a small M on (pytorch/ao #3496). The layout is here for comparison: the gate must
catch it.

    codes           int32 [N'/8, K/16T, 32, T/2]: N' = N padded to 8, T = `inner_k_tiles(K)`
    scale_and_zero  bfloat16 [K/g, N', 2] (`int4_affine.py`)
"""

import torch
from torch import Tensor

from ...formats.int4 import Int4
from ...formats.weight_format import Weight
from ..int4_affine import int4_of, pad_rows, refuses_groups, require_int4, scale_and_zero
from ..layout import PackedWeight, Problem, Serves

ROW_TILE = 8
K_TILE = 16
INNER_K_TILES = (8, 4, 2)
SERVES = Serves((Int4,), "cuda", (torch.bfloat16,), capability=(8, 0))


class Tinygemm:
    """Multiplies by `_weight_int4pack_mm`: bfloat16, groups of 32 to 256, any N; integer and fractional zeros
    alike.
    """

    name = "tinygemm"
    kernel = "tinygemm_m16n8k16_chunk_kernel"

    def refuses(self, problem: Problem) -> str | None:
        return SERVES.refuses(problem) or refuses_groups(int4_of(problem))

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        n, k = weight.shape
        padded = pad_rows(weight, ROW_TILE)
        # The converter wants the even k in the high nibble; our format keeps it in the low one.
        high_first = (padded.codes << 4) | (padded.codes >> 4)
        tensors = {
            "codes": torch._convert_weight_to_int4pack(high_first, inner_k_tiles(k)),
            "scale_and_zero": scale_and_zero(padded, torch.bfloat16),
        }
        attributes = {"group_size": weight.spec.group_size, "padded_rows": padded.shape[0] - n}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, attributes = packed.tensors, packed.attributes
        y = torch._weight_int4pack_mm(
            x, tensors["codes"], attributes["group_size"], tensors["scale_and_zero"]
        )
        return y[:, : packed.shape[0]] if attributes["padded_rows"] else y


def inner_k_tiles(k: int) -> int:
    """Return how many tiles of 16 columns the kernel keeps together: 8 as in torchao, fewer if K requires
    it.
    """
    return next(tiles for tiles in INNER_K_TILES if k % (tiles * K_TILE) == 0)
