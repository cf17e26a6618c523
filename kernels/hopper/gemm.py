"""Matrix product on Hopper with a packed weight: y [M, N] = x [M, K] @ w.T; the entry, and a tile's path.

                              HBM
          words, scales        |       x                          tma_loads.py
                +--------- TMA loads -----------+                 by one producer warp, a stage at a time
                v                               v
    ring of 3 to 8 stages in shared memory: words, scales | x [BM, 64..256]; full and empty mbarriers
                |                               + pairs of x transposed,  reorder_x.py: by two warps,
                |                               |                         for formats that look vectors up
         shared loads: a lane's words of        |                 mainloop.py
         a tile, 32 codes                       |                 by one or two warpgroups
                v                               |
         decoded: bf16 or fp16 pairs, al-       |                 decoder.py: the seam; one file a format
         ready where wgmma wants them           |                 operand.py
                v                               v
          A operand in registers        B operand in shared memory
                +---------- wgmma --------------+
                               v
               accumulator [BN, BM], fp32 registers
                               |
            +------------------+--------------------+
            | tile split over CTAs                  | whole tile   epilogue.py
            v                                       v
      partial sums, fp32 or scaled fp16,     rounded, transposed in the warp,
      through L2; the tile's owner           stored
      reduces them in order of K ---------->        |
                                                    v
                                                y in HBM

    stream_k.py          the kernel: K of all tiles split evenly over CTAs
    stream_k_config.py   which tile and which split for M, N, K
    tail_prefetch.py     a variant in which partial sums are loaded into the ring ahead of time
    invariant.py         batch-invariant split-K, with a main loop and an epilogue of its own
    invariant_config.py  its tiles and splits
    tile.py, traits.py   compile-time numbers on the host and on the device
    packed_operand.py    the weight and its TMA descriptors
    nibbles.py           what decoders of four-bit formats share
    row_pair_scales.py   what decoders share whose scales lie by pairs of rows
    ptx.py               inline PTX

The formats define the bytes: each has a folder beside this one, with a decoder and its packing. FP8's weights
are not decoded: both operands are in shared memory (`../fp8/rows.py`).

Not for other chips. Tile and split depend on the bucket of M and on the shape, so nothing compiles for a new
M. Tile and split were chosen by measurements (`tests/bench/kernels/int4_tuning.py`).
"""

import torch
from torch import Tensor

from . import invariant_config, stream_k, stream_k_config
from .packed_operand import PackedOperand

MAX_ROWS = 16384
"""Rows of x in a launch."""


def matmul(x: Tensor, weight: PackedOperand, n: int, batch_invariant: bool = False) -> Tensor:
    """Return y [M, N] = x [M, K] @ w.T; x has the decoder's dtype, bf16 or fp16, and is contiguous and
    aligned to 16 bytes.
    """
    m = len(x)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if batch_invariant:
        invariant_config.matmul(x, weight, y)
        return y
    if m <= MAX_ROWS:  # without views, which take as long as a small launch
        stream_k.launch(x, weight, y, stream_k_config.config_for(m, n, weight.columns))
        return y
    for first in range(0, m, MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        stream_k.launch(x[rows], weight, y[rows], stream_k_config.config_for(len(x[rows]), n, weight.columns))
    return y
