"""The triangular systems of chunks of prompts for the gated delta rule: inverses, and what follows from them.

What the letters mean is in `gated_delta_scan.py`, which launches these Triton kernels. They are parallel over
chunks and heads.

Chunks have numbers that a program can find without the host: a request that begins at token b has its chunks'
numbers from b // C + request on.

The inverse of I + M: blocks of 16 on the diagonal by forward substitution, all at once; then two blocks
become one by

    [P 0]^-1   [     P^-1          0   ]
    [B Q]    = [-Q^-1 B P^-1     Q^-1  ]

A series in powers of M would not do: its terms grow far beyond its sum if keys are alike.
"""

from typing import NamedTuple

from ..triton_imports import tl, triton

EPSILON = 1e-6
"""Added to a vector's squared length; the same as the reference's."""
BLOCK = 16
"""Tokens of a block that is solved by forward substitution, the least side of a product."""
PART = tl.constexpr(64)
"""Channels of keys or values that `_solve_chunks` multiplies at a time, and the fewest: with products of 16
channels of bf16 Triton 3.6 wrote a kernel that read outside of memory on an H100."""


class Strides(NamedTuple):
    """Of tokens and heads, in elements."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    decay_token: int
    decay_head: int
    rate_token: int
    rate_head: int
    out_token: int
    out_head: int


class ScanForm(NamedTuple):
    """Compile-time parameters of both kernels.

    shared:    heads of values that a head of keys serves
    keys:      K as a power of two
    columns:   of V in a program
    chunk:     tokens
    doublings: from blocks of 16 tokens to a chunk
    precision: of products
    by_channel: there is a decay for each channel
    """

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    keys: int
    columns: int
    chunk: int
    doublings: int
    epsilon: float
    precision: str
    by_channel: bool


@triton.jit
def chunk_number(request, begin, CHUNK: tl.constexpr):
    """Return the number of a request's first chunk; the others follow. No two chunks have the same number."""
    return begin // CHUNK + request


@triton.jit
def _find_chunk(number, start_loc_ptr, seq_lens_ptr, requests, CHUNK: tl.constexpr):
    """Return the chunk's first token, and the end of its request's tokens, which is no later if a request of
    one token has that number, or none has.
    """
    begun = tl.zeros([256], tl.int32)
    for other in range(0, requests, 256):
        index = other + tl.arange(0, 256)
        begin = tl.load(start_loc_ptr + index, mask=index < requests, other=0)
        begun += ((index < requests) & (chunk_number(index, begin, CHUNK) <= number)).to(tl.int32)
    request = tl.sum(begun, axis=0) - 1
    begin = tl.load(start_loc_ptr + request)
    end = tl.load(start_loc_ptr + request + 1)
    scanned = (end - begin > 1) & (tl.load(seq_lens_ptr + request) > 0)
    first = begin + (number - chunk_number(request, begin, CHUNK)) * CHUNK
    return first, tl.where(scanned, end, begin)


@triton.jit
def load_rows(ptr, stride, is_row, column, width, FORM: tl.constexpr):
    """Load columns of a chunk's rows, zeros outside."""
    row = tl.arange(0, FORM.chunk)
    keep = is_row[:, None] & (column < width)[None, :]
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=keep, other=0.0)


@triton.jit
def _diagonal_blocks(matrix, BLOCKS: tl.constexpr, SIDE: tl.constexpr):
    """Return the blocks [BLOCKS, SIDE, SIDE] on the diagonal."""
    same = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(matrix, [BLOCKS, SIDE, BLOCKS, SIDE]), 0.0), axis=2)


@triton.jit
def _merge(solved, lower, PAIRS: tl.constexpr, SIDE: tl.constexpr):
    """Make the inverses of pairs of blocks on the diagonal, [2 PAIRS, SIDE, SIDE], one inverse each."""
    pairs = tl.permute(tl.reshape(solved, [PAIRS, 2, SIDE, SIDE]), [0, 2, 3, 1])
    first, second = tl.split(pairs)
    wide = tl.reshape(_diagonal_blocks(lower, PAIRS, 2 * SIDE), [PAIRS, 2, SIDE, 2, SIDE])
    left, _ = tl.split(tl.permute(wide, [0, 1, 2, 4, 3]))
    _, below = tl.split(tl.permute(left, [0, 2, 3, 1]))
    if PAIRS == 1:
        # As matrices, of which each warp takes a part; of a batch it takes whole matrices.
        corner = tl.dot(
            tl.reshape(second, [SIDE, SIDE]), tl.reshape(below, [SIDE, SIDE]), input_precision="tf32x3"
        )
        corner = tl.dot(corner, tl.reshape(first, [SIDE, SIDE]), input_precision="tf32x3")
        corner = tl.reshape(-corner, [1, SIDE, SIDE])
    else:
        corner = tl.dot(second, below, input_precision="tf32x3")
        corner = -tl.dot(corner, first, input_precision="tf32x3")
    upper = tl.join(first, tl.zeros_like(first))
    merged = tl.join(upper, tl.join(corner, second))  # pair, row, column, half of columns, half of rows
    return tl.reshape(tl.permute(merged, [0, 4, 1, 3, 2]), [PAIRS, 2 * SIDE, 2 * SIDE])


@triton.jit
def _inverse(lower, FORM: tl.constexpr):
    """Invert I + lower [C, C], whose entries on and above the diagonal are zeros."""
    CHUNK: tl.constexpr = FORM.chunk
    DOUBLINGS: tl.constexpr = FORM.doublings
    SIDE: tl.constexpr = CHUNK >> DOUBLINGS
    blocks = _diagonal_blocks(lower, CHUNK // SIDE, SIDE)
    row = tl.arange(0, SIDE)[None, :, None]
    column = tl.arange(0, SIDE)[None, None, :]
    solved = tl.where(row == column, 1.0, tl.zeros([CHUNK // SIDE, SIDE, SIDE], tl.float32))
    for j in range(SIDE - 1):
        # Row j is done; the rows below it lose their share of it.
        share = tl.sum(tl.where(column == j, blocks, 0.0), axis=2)
        done = tl.sum(tl.where(row == j, solved, 0.0), axis=1)
        solved -= share[:, :, None] * done[:, None, :]
    for doubling in tl.static_range(DOUBLINGS):
        solved = _merge(solved, lower, CHUNK // (2 * SIDE) >> doubling, SIDE << doubling)
    return tl.reshape(solved, [CHUNK, CHUNK])


@triton.jit(do_not_specialize=["tokens", "requests"])
def solve_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, start_loc_ptr, seq_lens_ptr,
    w_ptr, u_ptr, mix_ptr, factors_ptr,
    STRIDES, tokens, requests, FORM: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of one chunk of one head, which has one decay."""
    head = tl.program_id(0)
    first, end = _find_chunk(tl.program_id(1), start_loc_ptr, seq_lens_ptr, requests, FORM.chunk)
    if first >= end:
        return

    token = first.to(tl.int64)
    key_head = head // FORM.shared
    q_ptr += token * STRIDES.q_token + key_head * STRIDES.q_head
    k_ptr += token * STRIDES.k_token + key_head * STRIDES.k_head
    v_ptr += token * STRIDES.v_token + head * STRIDES.v_head
    decay_ptr += token * STRIDES.decay_token + head * STRIDES.decay_head
    rate_ptr += token * STRIDES.rate_token + head * STRIDES.rate_head
    of_head = head.to(tl.int64) * tokens + token
    row = tl.arange(0, FORM.chunk)
    is_row = row < end - first
    part = tl.arange(0, PART)
    CHUNK: tl.constexpr = FORM.chunk
    KEYS: tl.constexpr = FORM.keys
    VALUE_DIM: tl.constexpr = FORM.value_dim
    OPERAND: tl.constexpr = w_ptr.dtype.element_ty

    k_by_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    q_by_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_length = tl.zeros([CHUNK], tl.float32)
    q_length = tl.zeros([CHUNK], tl.float32)
    for channel in tl.static_range(0, KEYS, PART):
        k = load_rows(k_ptr, STRIDES.k_token, is_row, channel + part, FORM.key_dim, FORM).to(OPERAND)
        q = load_rows(q_ptr, STRIDES.q_token, is_row, channel + part, FORM.key_dim, FORM).to(OPERAND)
        k_by_k = tl.dot(k, tl.trans(k), k_by_k, input_precision=FORM.precision)
        q_by_k = tl.dot(q, tl.trans(k), q_by_k, input_precision=FORM.precision)
        k_length += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        q_length += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
    k_unit = tl.rsqrt(k_length + FORM.epsilon)
    q_unit = tl.rsqrt(q_length + FORM.epsilon) * FORM.key_dim**-0.5
    decay = tl.load(decay_ptr + row * STRIDES.decay_token, mask=is_row, other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + row * STRIDES.rate_token, mask=is_row, other=0.0).to(tl.float32)
    summed = tl.cumsum(decay, axis=0)
    whole = tl.sum(decay, axis=0)

    until = row[:, None] >= row[None, :]
    left = tl.exp(tl.where(until, summed[:, None] - summed[None, :], -float("inf"))) * k_unit[None, :]
    mix = q_by_k * left * q_unit[:, None]
    mix_at = (of_head + row)[:, None] * FORM.chunk + row[None, :]
    tl.store(mix_ptr + mix_at, mix.to(OPERAND), mask=is_row[:, None])
    factors_ptr += of_head + row
    plane = FORM.heads * tokens.to(tl.int64)
    tl.store(factors_ptr, q_unit * tl.exp(summed), mask=is_row)
    tl.store(factors_ptr + plane, k_unit * tl.exp(tl.minimum(whole - summed, 0.0)), mask=is_row)
    tl.store(factors_ptr + 2 * plane, tl.exp(summed), mask=is_row)

    before = row[:, None] > row[None, :]
    inverse = _inverse(tl.where(before, k_by_k * left * (k_unit * rate)[:, None], 0.0), FORM)
    by_value = (inverse * rate[None, :]).to(OPERAND)
    by_key = (inverse * (rate * k_unit * tl.exp(summed))[None, :]).to(OPERAND)
    for channel in tl.static_range(0, KEYS, PART):
        column = channel + part
        k = load_rows(k_ptr, STRIDES.k_token, is_row, column, FORM.key_dim, FORM).to(OPERAND)
        w = tl.dot(by_key, k, input_precision=FORM.precision)
        keep = is_row[:, None] & (column < FORM.key_dim)[None, :]
        tl.store(w_ptr + (of_head + row)[:, None] * FORM.key_dim + column[None, :], w.to(OPERAND), mask=keep)
    for channel in tl.static_range(0, VALUE_DIM, PART):
        column = channel + part
        v = load_rows(v_ptr, STRIDES.v_token, is_row, column, FORM.value_dim, FORM).to(OPERAND)
        u = tl.dot(by_value, v, input_precision=FORM.precision)
        keep = is_row[:, None] & (column < FORM.value_dim)[None, :]
        tl.store(
            u_ptr + (of_head + row)[:, None] * FORM.value_dim + column[None, :], u.to(OPERAND), mask=keep
        )


@triton.jit(do_not_specialize=["tokens", "requests"])
def solve_channel_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, start_loc_ptr, seq_lens_ptr,
    w_ptr, u_ptr, mix_ptr, decays_ptr, q_grown_ptr, k_left_ptr,
    STRIDES, tokens, requests, FORM: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of one chunk of one head, with a decay for each channel.

    A decay between two tokens is then no product of a number of the one and a number of the other without
    exponents above 0, so the system is computed key by key, not by a product of matrices. What the scan
    multiplies by S, and adds to it, gets its decays here.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    first, end = _find_chunk(number, start_loc_ptr, seq_lens_ptr, requests, FORM.chunk)
    if first >= end:
        return
    CHUNK: tl.constexpr = FORM.chunk
    VALUE_DIM: tl.constexpr = FORM.value_dim
    OPERAND: tl.constexpr = w_ptr.dtype.element_ty
    token = first.to(tl.int64)
    key_head = head // FORM.shared
    row = tl.arange(0, CHUNK)
    is_row = row < end - first
    channel = tl.arange(0, FORM.keys)
    q_ptr += token * STRIDES.q_token + key_head * STRIDES.q_head
    k_ptr += token * STRIDES.k_token + key_head * STRIDES.k_head
    v_ptr += token * STRIDES.v_token + head * STRIDES.v_head
    decay_ptr += token * STRIDES.decay_token + head * STRIDES.decay_head
    rate_ptr += token * STRIDES.rate_token + head * STRIDES.rate_head
    k = load_rows(k_ptr, STRIDES.k_token, is_row, channel, FORM.key_dim, FORM).to(tl.float32)
    q = load_rows(q_ptr, STRIDES.q_token, is_row, channel, FORM.key_dim, FORM).to(tl.float32)
    decay = load_rows(decay_ptr, STRIDES.decay_token, is_row, channel, FORM.key_dim, FORM).to(tl.float32)
    rate = tl.load(rate_ptr + row * STRIDES.rate_token, mask=is_row, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + FORM.epsilon)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + FORM.epsilon) * FORM.key_dim**-0.5)[:, None]
    summed = tl.cumsum(decay, axis=0)
    whole = tl.sum(decay, axis=0)

    lower = tl.zeros([CHUNK, CHUNK], tl.float32)
    mix = tl.zeros([CHUNK, CHUNK], tl.float32)
    for j in range(CHUNK):
        k_j = tl.sum(tl.where(row[:, None] == j, k, 0.0), axis=0)
        summed_j = tl.sum(tl.where(row[:, None] == j, summed, 0.0), axis=0)
        left = tl.exp(tl.where(row[:, None] >= j, summed - summed_j[None, :], -float("inf"))) * k_j[None, :]
        is_j = row[None, :] == j
        k_by_k = (tl.sum(k * left, axis=1) * rate)[:, None]
        lower = tl.where(is_j & (row[:, None] > j), k_by_k, lower)
        mix = tl.where(is_j, tl.sum(q * left, axis=1)[:, None], mix)

    by_row = _inverse(lower, FORM) * rate[None, :]
    grown = tl.exp(summed)
    w = tl.dot(by_row, k * grown, input_precision="tf32x3")
    of_row = head.to(tl.int64) * tokens + token + row
    at = of_row[:, None] * FORM.key_dim + channel[None, :]
    keep = is_row[:, None] & (channel < FORM.key_dim)[None, :]
    tl.store(w_ptr + at, w.to(OPERAND), mask=keep)
    at = ((token + row) * FORM.heads + head)[:, None] * FORM.key_dim + channel[None, :]
    tl.store(q_grown_ptr + at, (q * grown).to(OPERAND), mask=keep)
    k_left = k * tl.exp(tl.minimum(whole[None, :] - summed, 0.0))
    tl.store(k_left_ptr + at, k_left.to(OPERAND), mask=keep)
    tl.store(mix_ptr + of_row[:, None] * CHUNK + row[None, :], mix.to(OPERAND), mask=is_row[:, None])
    decays_ptr += (number * FORM.heads + head) * FORM.key_dim + channel
    tl.store(decays_ptr, tl.exp(whole), mask=channel < FORM.key_dim)
    for some in tl.static_range(0, VALUE_DIM, PART):
        column = some + tl.arange(0, PART)
        v = load_rows(v_ptr, STRIDES.v_token, is_row, column, VALUE_DIM, FORM).to(tl.float32)
        u = tl.dot(by_row, v, input_precision="tf32x3").to(OPERAND)
        keep = is_row[:, None] & (column < VALUE_DIM)[None, :]
        tl.store(u_ptr + of_row[:, None] * VALUE_DIM + column[None, :], u, mask=keep)
