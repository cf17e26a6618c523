"""Sorting a step's assignments by expert, in blocks for grouped products; Triton, and its reference.

Every token is routed to top_k experts: assignment a = t * top_k + j of token t. A grouped product needs the
assignments of one expert together, in blocks of a fixed number of rows, without the host knowing the counts.

    expert        int64 [T, top_k]       0 .. E-1; any other number is in no block, and nothing is computed
    assignments   int32 [blocks, rows]   of one expert each block, ascending; T * top_k where there is none
    block_expert  int32 [blocks]         ascending; -1 from the last used block on, whose rows are undefined

A assignments over n experts need at most n + (A - n) // rows blocks, most for n = min(A, E).

One program per expert counts all experts' assignments, so it knows where its own blocks begin, and stores its
own assignments by their rank. The same routing gives the same blocks: there are no atomics in global memory
and no order of programs. One launch serves any number of tokens; it is compiled once per bucket.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .tile import ROWS_PER_EXPERT, block_rows_of, bucket_of


@dataclass(frozen=True)
class ExpertRouting:
    """Blocks of assignments; the file's docstring describes the tensors.

    count:  assignments, T * top_k
    bucket: the index of the tiles to use, see `tile.py`
    """

    assignments: Tensor
    block_expert: Tensor
    count: int
    experts: int
    bucket: int

    @property
    def blocks(self) -> int:
        return self.assignments.shape[0]

    @property
    def block_rows(self) -> int:
        return self.assignments.shape[1]

    def rows_per_input(self, inputs: int) -> int:
        """Consecutive assignments that share a row of x: top_k if x is by token, 1 if it is by assignment."""
        if inputs == 0 or self.count % inputs:
            raise ValueError(f"{inputs} rows of x for {self.count} assignments")
        return self.count // inputs


def max_blocks(count: int, experts: int, block_rows: int) -> int:
    """Return the most blocks that `count` assignments can need."""
    used = min(count, experts)
    return used + (count - used) // block_rows


def route_reference(expert: Tensor, experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Return `assignments` and `block_expert` with unused blocks filled in; in plain torch, with the host's
    help.
    """
    flat = expert.flatten()
    count = len(flat)
    blocks = max_blocks(count, experts, block_rows)
    assignments = torch.full((blocks, block_rows), count, dtype=torch.int32)
    block_expert = torch.full((blocks,), -1, dtype=torch.int32)
    block = 0
    for index in range(experts):
        for part in (flat == index).nonzero().flatten().split(block_rows):
            if len(part):
                assignments[block, : len(part)] = part.int()
                block_expert[block] = index
                block += 1
    return assignments.to(expert.device), block_expert.to(expert.device)


@triton.jit(do_not_specialize=["count", "blocks"], do_not_specialize_on_alignment=["expert_ptr"])
def _route(
    expert_ptr, assignments_ptr, block_expert_ptr, count, experts, blocks,
    ROWS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert, and some of the unused blocks."""
    if PDL:
        # The product may take its place on the device while this runs; it waits for what is stored here.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        expert = tl.load(expert_ptr + at, mask=at < count, other=-1).to(tl.int32)
        counts += tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < experts))
    used = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < own, used, 0))
    total = tl.sum(used)
    own_count = tl.sum(tl.where(bins == own, counts, 0))
    own_blocks = (own_count + ROWS - 1) // ROWS

    for start in range(0, own_blocks, BINS):
        block = start + bins
        tl.store(block_expert_ptr + first + block, own, mask=block < own_blocks)
    for start in range(total + own * BINS, blocks, experts * BINS):
        tl.store(block_expert_ptr + start + bins, -1, mask=start + bins < blocks)

    own_ptr = assignments_ptr + first * ROWS
    padding = own_count + tl.arange(0, ROWS)
    tl.store(own_ptr + padding, count, mask=padding < own_blocks * ROWS)
    rank = 0
    for start in range(0, tl.where(own_count > 0, count, 0), CHUNK):
        at = start + tl.arange(0, CHUNK)
        expert = tl.load(expert_ptr + at, mask=at < count, other=-1).to(tl.int32)
        mine = (expert == own).to(tl.int32)
        tl.store(own_ptr + rank + tl.cumsum(mine) - 1, at, mask=mine > 0)
        rank += tl.sum(mine)


LARGEST_CHUNK = 4096


def chunk_of(bucket: int, experts: int) -> tuple[int, int]:
    """Return how many assignments a program reads at once (all of a bucket's, if there are few), and its
    number of warps.
    """
    most = min(ROWS_PER_EXPERT[bucket] * experts, LARGEST_CHUNK)
    chunk = max(32, triton.next_power_of_2(int(most)))
    return chunk, 1 if chunk <= 128 else 4 if chunk <= 1024 else 8


def buffer_size(count: int, experts: int) -> int:
    """Return the most int32 numbers that the blocks of `count` assignments need, in any bucket.

    The bound is linear in `count`, with no conditions, so it holds for a number of tokens that a traced graph
    knows as a symbol only. Blocks of 8 rows need 9 numbers each, at most 9 E + 9/8 A in all; blocks of 16
    rows need 17 min(A, E) + 17/16 (A - E), which is largest for A = E; larger blocks, for experts with more
    rows, need hardly more.
    """
    return 8 * count + 9 * experts


def routing_in(buffer: Tensor, count: int, experts: int, block_rows: int | None = None) -> ExpertRouting:
    """Return the blocks that `buffer`, int32 [at least `buffer_size`], holds for `count` assignments."""
    bucket = bucket_of(count, experts)
    rows = block_rows_of(count, experts) if block_rows is None else block_rows
    blocks = max_blocks(count, experts, rows)
    assignments = buffer[: blocks * rows].view(blocks, rows)
    return ExpertRouting(assignments, buffer[blocks * rows : blocks * (rows + 1)], count, experts, bucket)


def route_into(buffer: Tensor, expert: Tensor, experts: int, block_rows: int | None = None) -> ExpertRouting:
    """Sort `expert` [T, top_k] into blocks for products over `experts` experts; no host synchronization.

    buffer:     int32 [`buffer_size`], where they are put
    block_rows: a power of two; None takes what the bucket says, which is what the products are tuned for
    """
    routing = routing_in(buffer, expert.numel(), experts, block_rows)
    chunk, warps = chunk_of(routing.bucket, experts)
    pdl = compute_capability(expert.device) >= (9, 0)
    _route[(experts,)](
        expert.contiguous(), routing.assignments, routing.block_expert,
        routing.count, experts, routing.blocks,
        ROWS=routing.block_rows, BINS=max(32, triton.next_power_of_2(experts)), CHUNK=chunk, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return routing


def route(expert: Tensor, experts: int, block_rows: int | None = None) -> ExpertRouting:
    """Return the same blocks in a new buffer."""
    count = expert.numel()
    size = buffer_size(count, experts)
    if block_rows is not None:
        size = max(size, max_blocks(count, experts, block_rows) * (block_rows + 1))
    buffer = torch.empty(size, dtype=torch.int32, device=expert.device)
    return route_into(buffer, expert, experts, block_rows)
