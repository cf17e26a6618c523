"""The CUDA graph buckets: how many tokens the batches are padded to, for decoding and for mixed batches."""

import torch

LARGEST_GRAPH = 1024
"""Tokens of a mixed batch; from here on kernels take longer than their launches, and no graph is needed."""


def decode_buckets(
    max_num_seqs: int, device: torch.device, asked: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Batch sizes that a decode step may have, ascending, up to max_num_seqs; None for all of them.

    asked: the user's. Else on CUDA 1, 2, 4, 8 and then every eighth, and on the CPU, where padding is only
    work, every size.
    """
    if asked is None and device.type == "cpu":
        return None
    sizes = asked or (1, 2, 4, *range(8, max_num_seqs + 8, 8))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def mixed_buckets(largest: int) -> tuple[int, ...]:
    """Every 64 tokens up to 640, then every 128, so that little is computed for nothing."""
    sizes = [*range(64, 641, 64), *range(768, LARGEST_GRAPH + 1, 128)]
    return (*(size for size in sizes if size < largest), *((largest,) if largest <= LARGEST_GRAPH else ()))


def mixed_warm_up_buckets(largest: int) -> list[int]:
    """Every bucket, and of the larger sizes enough to meet all that kernels choose by them."""
    larger = [LARGEST_GRAPH * halves // 2 << power for power in range(8) for halves in (3, 4)]
    sizes = [*mixed_buckets(largest), *(size for size in larger if size < largest), largest]
    return list(dict.fromkeys(sizes))
