"""One layer's KVarN pages and the unquantized tokens of each request, on either device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.kvarn.reference import KVarNTile
from ..layer import KVShape, PoolSize, zeros


@dataclass(frozen=True)
class KVarNStorage:
    """One layer's pages, rotated and quantized, and each request's unquantized pages.

    pages: a KVarNTile of [pages, H_kv] tiles
    held:  [rows + 1, 2, 2, H_kv, G, D]: the first page and the current page, keys and values. In the model's
           dtype and not rotated, so that short contexts need no rotation
    """

    pages: KVarNTile
    held: Tensor
    value_bits: int

    @classmethod
    def allocate(
        cls, shape: KVShape, size: PoolSize, value_bits: int, device: torch.device
    ) -> "KVarNStorage":
        """Allocate one layer's storage. shape: the padded shape."""
        group, dim, tiles = size.page_size, shape.key_dim, (size.num_pages, shape.heads)
        pages = KVarNTile(
            zeros((*tiles, group, dim // 4), torch.int16, device),
            zeros((*tiles, group * value_bits // 4, dim // 4), torch.int16, device),
            zeros((*tiles, 3, dim), torch.float16, device),
            zeros((*tiles, 3, group), torch.float16, device),
        )
        held = (size.max_requests + 1, 2, 2, shape.heads, group, dim)
        return cls(pages, zeros(held, shape.dtype, device), value_bits)

    @property
    def group_size(self) -> int:
        return self.held.shape[4]

    @property
    def dim(self) -> int:
        return self.held.shape[5]
