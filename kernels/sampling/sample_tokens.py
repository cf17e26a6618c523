"""Token sampling (temperature, top-k, top-p, min-p) with settings of each row's own; Triton, for CUDA graphs.

One launch draws tokens for any settings, as the engine's `sampling/sampler.py` does with torch on a CPU.
Settings are read from the memory of each request, so a captured graph draws for any mixture of settings.

    logits       [B, V]         bf16, fp16 or fp32
    rows         int64 [B]      whose settings apply, 0 .. R - 1
    positions    int64 [B]      of the tokens to be drawn
    numbers      fp32 [R, 3]    temperature (0 is greedy), top_p (1 keeps all), log(min_p) (-inf keeps all)
    integers     int64 [R, 2]   seed, top_k (0 keeps all)
    out          int64 [B]

One program handles a row. A greedy row takes the first of the greatest logits, in one pass. For other rows,
one uniform number made from seed and position is looked up in the cumulative distribution, which takes two
more passes. The bound of top_k or top_p is a distance from the greatest logit, counted in numbers of the
logits' dtype, so equal logits are kept or dropped together. A pass tries three bounds, which determines two
bits of the bound. Most bounds are small, so one pass checks whether the upper bits are zero. A bound takes
six passes for bf16, or nine if its upper bits are not zero; top_p within top_k takes fewer. Passes after the
first one read a row of 152k bf16 logits from L2.

A call reads 2 * B * V bytes of bf16 logits once from memory: 128 rows of 152k are 39 MB, 9 us at 4.3 TB/s.
"""

import torch
from torch import Tensor

from ..triton_imports import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = 16384
"""Logits that a program takes at once."""


@triton.jit
def _key(logits):
    """Map fp32 to int32 in the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _block(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """Load fp32 [BLOCK], -inf past the end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _below(logits, greatest, SHIFT: tl.constexpr):
    """Return, as uint32, how many numbers of their dtype lie between each logit and the greatest logit; 32 -
    SHIFT bits.
    """
    return ((_key(greatest) >> SHIFT) - (_key(logits) >> SHIFT)).to(tl.uint32, bitcast=True)


@triton.jit
def _weights(logits, below, greatest, scale, lowest, bound):
    """Return exp((logit - greatest) / temperature) of the tokens that are kept, 0 for other tokens."""
    power = (logits - greatest) * scale
    return tl.where((power >= lowest) & (below <= bound), tl.exp2(power), 0.0)


@triton.jit
def _eighths(values, BLOCK: tl.constexpr):
    """Return [BLOCK / 8]: sums of eight neighbours, which a thread has anyway."""
    return tl.sum(tl.reshape(values, [BLOCK // 8, 8]), axis=1)


@triton.jit
def _uniform(seed, position):
    """Return a uniform number in [0, 1): splitmix64 of seed and position."""
    state = seed + (position + 1) * -0x61C8864680B583EB
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    return ((state >> 40) & 0xFFFFFF).to(tl.float32) / 16777216.0


@triton.jit
def _sample(
    logits_ptr, rows_ptr, positions_ptr, numbers_ptr, integers_ptr, out_ptr, logits_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Draw for one row; BITS: of the logits' dtype, whose bits are the sort keys."""
    SHIFT: tl.constexpr = 32 - BITS
    out_ptr += tl.program_id(0)
    logits_ptr += tl.program_id(0).to(tl.int64) * logits_stride
    settings = tl.load(rows_ptr + tl.program_id(0))
    temperature = tl.load(numbers_ptr + settings * 3)

    # Half of what a pass takes at once, so that registers are left for loads under way.
    HALF: tl.constexpr = BLOCK // 2
    best = tl.full([HALF], -float("inf"), tl.float32)
    first = tl.arange(0, HALF)
    best_token = first
    for start in tl.range(0, VOCAB, HALF, loop_unroll_factor=5):
        logits = _block(logits_ptr, start, VOCAB, HALF)
        better = logits > best
        best = tl.where(better, logits, best)
        best_token = tl.where(better, start + first, best_token)
    greatest = tl.max(best, axis=0)
    drawn = tl.min(tl.where(best == greatest, best_token, VOCAB), axis=0)

    if temperature > 0:
        top_p = tl.load(numbers_ptr + settings * 3 + 1)
        seed = tl.load(integers_ptr + settings * 2)
        top_k = tl.load(integers_ptr + settings * 2 + 1)
        scale = LOG2_E / temperature
        lowest = tl.load(numbers_ptr + settings * 3 + 2) * LOG2_E
        token = tl.arange(0, BLOCK)
        bit = tl.full([], 1, tl.uint32)
        near = bit << (BITS - 6)
        bound = tl.full([], 0xFFFFFFFF >> SHIFT, tl.uint32)
        if top_k > 0:
            # Fewer than k lie nearer than `found`, which grows from its upper bits down.
            count = tl.zeros([BLOCK // 8], tl.int32)
            for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=2):
                below = _below(_block(logits_ptr, start, VOCAB, BLOCK), greatest, SHIFT)
                count += _eighths((below < near).to(tl.int32), BLOCK)
            step = tl.where(tl.sum(count, axis=0) < top_k, bit << (BITS - 2), near >> 2)
            found = bit - bit
            while step > 0:
                count = tl.zeros([BLOCK // 8], tl.int32)
                count_2 = count
                count_3 = count
                for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=2):
                    below = _below(_block(logits_ptr, start, VOCAB, BLOCK), greatest, SHIFT)
                    count += _eighths((below < found + step).to(tl.int32), BLOCK)
                    count_2 += _eighths((below < found + 2 * step).to(tl.int32), BLOCK)
                    count_3 += _eighths((below < found + 3 * step).to(tl.int32), BLOCK)
                steps = (tl.sum(count, axis=0) < top_k).to(tl.uint32)
                steps += (tl.sum(count_2, axis=0) < top_k).to(tl.uint32)
                steps += (tl.sum(count_3, axis=0) < top_k).to(tl.uint32)
                found += steps * step
                step = step >> 2
            bound = found

        mass = tl.zeros([BLOCK // 8], tl.float32)
        near_mass = mass
        for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=2):
            logits = _block(logits_ptr, start, VOCAB, BLOCK)
            below = _below(logits, greatest, SHIFT)
            weights = _weights(logits, below, greatest, scale, lowest, bound)
            mass += _eighths(weights, BLOCK)
            near_mass += _eighths(tl.where(below < near, weights, 0.0), BLOCK)
        total = tl.sum(mass, axis=0)

        if top_p < 1:
            # What lies nearer than `found` has less than top_p of the mass.
            wanted = top_p * total
            sum_1 = tl.sum(near_mass, axis=0)
            step = tl.where(sum_1 < wanted, bit << (BITS - 2), near >> 2)
            total = tl.where(sum_1 < wanted, total, sum_1)
            found = bit - bit
            while step > 0:
                if step <= bound:
                    mass = tl.zeros([BLOCK // 8], tl.float32)
                    mass_2 = mass
                    mass_3 = mass
                    for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=2):
                        logits = _block(logits_ptr, start, VOCAB, BLOCK)
                        below = _below(logits, greatest, SHIFT)
                        weights = _weights(logits, below, greatest, scale, lowest, bound)
                        mass += _eighths(tl.where(below < found + step, weights, 0.0), BLOCK)
                        mass_2 += _eighths(tl.where(below < found + 2 * step, weights, 0.0), BLOCK)
                        mass_3 += _eighths(tl.where(below < found + 3 * step, weights, 0.0), BLOCK)
                    sum_1 = tl.sum(mass, axis=0)
                    sum_2 = tl.sum(mass_2, axis=0)
                    sum_3 = tl.sum(mass_3, axis=0)
                    # The least that is enough is what is kept if no pass to come finds less.
                    total = tl.where(sum_3 >= wanted, sum_3, total)
                    total = tl.where(sum_2 >= wanted, sum_2, total)
                    total = tl.where(sum_1 >= wanted, sum_1, total)
                    steps = (sum_1 < wanted).to(tl.uint32) + (sum_2 < wanted).to(tl.uint32)
                    steps += (sum_3 < wanted).to(tl.uint32)
                    found += steps * step
                step = step >> 2
            bound = tl.minimum(bound, found)

        target = _uniform(seed, tl.load(positions_ptr + tl.program_id(0))) * total
        before = 0.0
        start = 0
        searching = True
        while searching & (start < VOCAB):
            logits = _block(logits_ptr, start, VOCAB, BLOCK)
            below = _below(logits, greatest, SHIFT)
            weights = _weights(logits, below, greatest, scale, lowest, bound)
            here = tl.sum(weights, axis=0)
            if before + here > target:
                above = before + tl.cumsum(weights, axis=0) > target
                # Rounding may leave the sum at the target: then it is the last token that is kept.
                last = tl.max(tl.where(weights > 0, start + token, 0), axis=0)
                drawn = tl.minimum(tl.min(tl.where(above, start + token, VOCAB), axis=0), last)
                searching = False
            elif here > 0:
                drawn = tl.max(tl.where(weights > 0, start + token, 0), axis=0)
            before += here
            start += BLOCK
    tl.store(out_ptr, drawn.to(tl.int64))


def sample_tokens(
    logits: Tensor, rows: Tensor, positions: Tensor, numbers: Tensor, integers: Tensor
) -> Tensor:
    """Return tokens int64 [B]; arguments are described above. One vocabulary and dtype compile once."""
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _sample[(batch,)](
        logits, rows, positions, numbers, integers, out, logits.stride(0),
        VOCAB=vocab, BLOCK=min(BLOCK, max(8, triton.next_power_of_2(vocab))),
        BITS=16 if logits.dtype == torch.bfloat16 else 32, num_warps=16,
    )  # fmt: skip
    return out
