"""Sums of a product whose K is split among CTAs: each writes its sums, and the last one adds them; Triton.

Sums are added in the order of K whichever CTA is the last, so the bits do not depend on the order in which
CTAs end. Partial sums are fp32 and go through L2: `8 bytes * M * N * splits`, written and read.
"""

from .triton_imports import tl, triton


@triton.jit
def partials_of(partials, tile, splits, BN: tl.constexpr, BM: tl.constexpr):
    """Return where the sums of a tile [bn, bm] in its first split lie; the sums of the next split follow bn *
    bm numbers later.
    """
    within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    return partials + tile.to(tl.int64) * splits * (BN * BM) + within


@triton.jit
def ends_last(at, sums, semaphore, split, splits, BN: tl.constexpr, BM: tl.constexpr):
    """Write a split's sums [bn, bm]; return whether all other splits' sums are there."""
    tl.store(at + split * (BN * BM), sums)
    tl.debug_barrier()
    return tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu") == splits - 1


@triton.jit
def sum_of_splits(at, semaphore, splits, BN: tl.constexpr, BM: tl.constexpr):
    """Return the sum of all splits, for the CTA that ends last; it resets the semaphore."""
    total = tl.zeros([BN, BM], tl.float32)
    for index in range(splits):
        total += tl.load(at + index * (BN * BM), cache_modifier=".cg")
    tl.store(semaphore, 0)
    return total
