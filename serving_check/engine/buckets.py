"""Buckets for CUDA graphs: the sizes to which decode steps and mixed batches are padded."""

import torch

LARGEST_GRAPH = 1024
"""The most tokens in a graph. In larger mixed batches, kernels take longer than launches, so graphs gain
nothing."""


def decode_buckets(
    max_num_seqs: int, device: torch.device, asked: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Return the batch sizes of decode steps, ascending, up to max_num_seqs; None for every size.

    asked: the user's sizes. If the user gives no batch sizes, CUDA uses 1, 2, 4, 8 and then every eighth
           size; a CPU uses every size, since padding would only add work
    """
    if asked is None and device.type == "cpu":
        return None
    sizes = asked or (1, 2, 4, *range(8, max_num_seqs + 8, 8))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def mixed_buckets(largest: int) -> tuple[int, ...]:
    """Return bucket sizes: every 64 tokens up to 640, then every 128, so that padding adds little work."""
    sizes = [*range(64, 641, 64), *range(768, LARGEST_GRAPH + 1, 128)]
    return (*(size for size in sizes if size < largest), *((largest,) if largest <= LARGEST_GRAPH else ()))


def mixed_warm_up_buckets(largest: int) -> list[int]:
    """Return the sizes to warm up: every bucket, and enough larger sizes to run every kernel variant."""
    larger = [LARGEST_GRAPH * halves // 2 << power for power in range(8) for halves in (3, 4)]
    sizes = [*mixed_buckets(largest), *(size for size in larger if size < largest), largest]
    return list(dict.fromkeys(sizes))
