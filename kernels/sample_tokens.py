"""Drawing a token for each row of logits, every row by its own settings; Triton, for CUDA graphs.

What `serving_check/engine/sampler.py` does with torch on a CPU, in one launch whatever the rows ask for.
Settings are read from where their request has them: a captured graph draws for any mixture.

    logits       [B, V]         bf16, fp16 or fp32
    rows         int64 [B]      whose settings apply, 0 .. R - 1
    positions    int64 [B]      of the tokens to be drawn
    numbers      fp32 [R, 3]    temperature (0 is greedy), top_p (1 keeps all), log(min_p) (-inf keeps all)
    integers     int64 [R, 2]   seed, top_k (0 keeps all)
    out          int64 [B]

A program takes a row. Greedy: the first of the greatest logits, one pass. Otherwise one uniform number from
seed and position is looked up in the cumulative distribution, two passes more. A bound for top_k or top_p is
found bit by bit, in as many passes as the logits' dtype has bits, equals staying together; passes after the
first find a row of 152k bf16 logits in L2.

Bytes: 2 * B * V of bf16 logits, once from memory: 128 rows of 152k are 39 MB, 9 us at 4.3 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
"""Logits that a program takes at once."""


@triton.jit
def _key(logits):
    """fp32 to int32 in the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _block(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """fp32 [BLOCK], -inf past the end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _weights(logits, temperature, greatest, lowest, bound):
    """exp(score - greatest) of the tokens that are kept, 0 of the others; scores are logits / temperature."""
    scores = logits / temperature
    kept = (scores >= lowest) & (_key(logits) >= bound)
    return tl.where(kept, tl.exp(scores - greatest), 0.0)


@triton.jit
def _uniform(seed, position):
    """In [0, 1): splitmix64 of seed and position."""
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
    """One row; BITS: of a logit's key, from the top, that can differ from row to row."""
    out_ptr += tl.program_id(0)
    logits_ptr += tl.program_id(0).to(tl.int64) * logits_stride
    settings = tl.load(rows_ptr + tl.program_id(0))
    temperature = tl.load(numbers_ptr + settings * 3)

    best = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.arange(0, BLOCK)
    best_token = token
    for start in range(0, VOCAB, BLOCK):
        logits = _block(logits_ptr, start, VOCAB, BLOCK)
        better = logits > best
        best = tl.where(better, logits, best)
        best_token = tl.where(better, start + token, best_token)
    greatest = tl.max(best, axis=0)
    drawn = tl.min(tl.where(best == greatest, best_token, VOCAB), axis=0)

    if temperature > 0:
        top_p = tl.load(numbers_ptr + settings * 3 + 1)
        seed = tl.load(integers_ptr + settings * 2)
        top_k = tl.load(integers_ptr + settings * 2 + 1)
        greatest = greatest / temperature
        lowest = greatest + tl.load(numbers_ptr + settings * 3 + 2)
        smallest = tl.full([], -0x80000000, tl.int32)
        bound = smallest
        if top_k > 0:
            # Keys with their sign flipped are unsigned: bits are found from the top, as of any number.
            found = tl.full([], 0, tl.int32)
            for bit in range(BITS):
                candidate = found | (tl.full([], 1, tl.int32) << (31 - bit))
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, VOCAB, BLOCK):
                    keys = _key(_block(logits_ptr, start, VOCAB, BLOCK))
                    count += ((keys >= (candidate ^ smallest)) & (start + token < VOCAB)).to(tl.int32)
                found = tl.where(tl.sum(count, axis=0) >= top_k, candidate, found)
            bound = found ^ smallest

        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            logits = _block(logits_ptr, start, VOCAB, BLOCK)
            mass += _weights(logits, temperature, greatest, lowest, bound)
        total = tl.sum(mass, axis=0)

        if top_p < 1:
            wanted = top_p * total
            found = tl.full([], 0, tl.int32)
            for bit in range(BITS):
                candidate = found | (tl.full([], 1, tl.int32) << (31 - bit))
                mass = tl.zeros([BLOCK], tl.float32)
                for start in range(0, VOCAB, BLOCK):
                    logits = _block(logits_ptr, start, VOCAB, BLOCK)
                    stricter = tl.maximum(bound, candidate ^ smallest)
                    mass += _weights(logits, temperature, greatest, lowest, stricter)
                candidate_total = tl.sum(mass, axis=0)
                total = tl.where(candidate_total >= wanted, candidate_total, total)
                found = tl.where(candidate_total >= wanted, candidate, found)
            bound = tl.maximum(bound, found ^ smallest)

        target = _uniform(seed, tl.load(positions_ptr + tl.program_id(0))) * total
        before = 0.0
        start = 0
        searching = True
        while searching & (start < VOCAB):
            logits = _block(logits_ptr, start, VOCAB, BLOCK)
            weights = _weights(logits, temperature, greatest, lowest, bound)
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
    """Tokens int64 [B]; arguments as in the file's docstring. Compiles once for a vocabulary and a dtype."""
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _sample[(batch,)](
        logits, rows, positions, numbers, integers, out, logits.stride(0),
        VOCAB=vocab, BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        BITS=16 if logits.dtype == torch.bfloat16 else 32, num_warps=16,
    )  # fmt: skip
    return out
