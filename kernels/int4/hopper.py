"""The INT4 product on Hopper."""

import torch
from torch import Tensor

from . import invariant_config, stream_k, stream_k_config

MAX_ROWS = 16384


def matmul(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    semaphores: Tensor,
    n: int,
    group_size: int,
    fractional: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T; x bf16 or fp16, contiguous, on 16 bytes; `semaphores` zero, and left so."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    operands = words, scale_words, semaphores
    if batch_invariant:
        invariant_config.matmul(x, *operands, y, group_size, fractional)
        return y
    for first in range(0, m, MAX_ROWS):
        some = slice(first, first + MAX_ROWS)
        chosen = stream_k_config.config_for(len(x[some]), n, k)
        stream_k.launch(
            x[some],
            *operands,
            y[some],
            group_size,
            fractional,
            chosen.tile,
            chosen.num_ctas,
            chosen.start_offsets,
            chosen.head_iters,
        )
    return y
