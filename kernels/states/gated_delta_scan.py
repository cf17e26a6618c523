"""Prompts of the gated delta rule, some tokens at a time on tensor cores; two Triton kernels.

Arguments are those of `gated_delta_rule.py`, with one decay for each head. A chunk is C tokens of a request
that has more than one token in the step. With k and q unit vectors (q scaled), A[t] the sum of log decays up
to token t of the chunk and L[t, j] = exp(A[t] - A[j]) for j <= t, the tokens add to S along their keys

    added = (I + M)^-1 (b v - b exp(A) k S)         M[t, j] = b[t] L[t, j] k[t] · k[j]  for j < t
          = u - w S                                 u = (I + M)^-1 b v,  w = (I + M)^-1 b exp(A) k
    out   = exp(A) q S + (L * q k^T) added
    S     = exp(A[C-1]) S + (exp(A[C-1] - A) k)^T added

`_solve_chunks` computes w, u and L * q k^T of all chunks at once. `_scan_chunks` goes through the chunks of a
request with some columns of one head's S in registers. Lengths of k and q, decays and rates are factors of
rows and columns and are applied to products; the operands of products are then what the caller gave.

The inverse: blocks of 16 on the diagonal by forward substitution, all at once, then two of them become one
by

    [P 0]^-1   [     P^-1          0   ]
    [B Q]    = [-Q^-1 B P^-1     Q^-1  ]

A series in powers of M would not do: its terms grow far beyond its sum if keys are alike.

If q, k and v are bf16, the operands of products are bf16, as in flash-linear-attention: w, u, S, `added` and
L * q k^T are rounded to bf16; sums, and S from chunk to chunk, are float32. Otherwise operands are float32
and are multiplied as tf32, or as three tf32 products if q, k or v are float32. The inverse takes three.

A workspace has K + V + C elements for each token and head, and 3 numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability, keeps_sums_in_registers
from ..triton_imports import tl, triton
from .batch import StateBatch
from .row_strides import in_units, stride_unit, token_and_head

EPSILON = 1e-6
"""Added to a vector's squared length; the same as the reference's."""
BLOCK = 16
"""Tokens of a block that is solved by forward substitution, the least side of a product."""
PART = tl.constexpr(64)
"""Channels of keys or values that `_solve_chunks` multiplies at a time, and the fewest: with products of 16
channels of bf16 Triton 3.6 wrote a kernel that read outside of memory on an H100."""


class ScanForm(NamedTuple):
    """Compile-time parameters of both kernels.

    shared:    heads of values that a head of keys serves
    keys:      K as a power of two
    values:    columns of V in a program
    chunk:     tokens
    doublings: from blocks of 16 tokens to a chunk
    precision: of products
    unit:      as `stride_unit` returns it
    """

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    keys: int
    values: int
    chunk: int
    doublings: int
    epsilon: float
    precision: str
    unit: int


@triton.jit
def _load_rows(ptr, stride, is_row, column, width, FORM: tl.constexpr):
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


@triton.jit(
    do_not_specialize=[
        "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "decay_token", "decay_head",
        "rate_token", "rate_head", "tokens", "requests",
    ]
)  # fmt: skip
def _solve_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, start_loc_ptr, seq_lens_ptr,
    w_ptr, u_ptr, mix_ptr, factors_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, rate_token, rate_head,
    tokens, requests, FORM: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of one chunk of one head.

    Chunk c of a request that begins at token b has the number b // C + request + c, which no other chunk has.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    begun = tl.zeros([256], tl.int32)
    for other in range(0, requests, 256):
        index = other + tl.arange(0, 256)
        begin = tl.load(start_loc_ptr + index, mask=index < requests, other=0)
        begun += ((index < requests) & (begin // FORM.chunk + index <= number)).to(tl.int32)
    request = tl.sum(begun, axis=0) - 1
    first = tl.load(start_loc_ptr + request)
    end = tl.load(start_loc_ptr + request + 1)
    if end - first < 2:
        return
    first += (number - first // FORM.chunk - request) * FORM.chunk
    if first >= end:
        return
    if tl.load(seq_lens_ptr + request) == 0:
        return

    token = first.to(tl.int64)
    key_head = head // FORM.shared
    q_ptr += token * (q_token * FORM.unit) + key_head * (q_head * FORM.unit)
    k_ptr += token * (k_token * FORM.unit) + key_head * (k_head * FORM.unit)
    v_ptr += token * (v_token * FORM.unit) + head * (v_head * FORM.unit)
    decay_ptr += token * decay_token + head * decay_head
    rate_ptr += token * rate_token + head * rate_head
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
        k = _load_rows(k_ptr, k_token * FORM.unit, is_row, channel + part, FORM.key_dim, FORM).to(OPERAND)
        q = _load_rows(q_ptr, q_token * FORM.unit, is_row, channel + part, FORM.key_dim, FORM).to(OPERAND)
        k_by_k = tl.dot(k, tl.trans(k), k_by_k, input_precision=FORM.precision)
        q_by_k = tl.dot(q, tl.trans(k), q_by_k, input_precision=FORM.precision)
        k_length += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        q_length += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
    k_unit = tl.rsqrt(k_length + FORM.epsilon)
    q_unit = tl.rsqrt(q_length + FORM.epsilon) * FORM.key_dim**-0.5
    decay = tl.load(decay_ptr + row * decay_token, mask=is_row, other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + row * rate_token, mask=is_row, other=0.0).to(tl.float32)
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
        k = _load_rows(k_ptr, k_token * FORM.unit, is_row, column, FORM.key_dim, FORM).to(OPERAND)
        w = tl.dot(by_key, k, input_precision=FORM.precision)
        keep = is_row[:, None] & (column < FORM.key_dim)[None, :]
        tl.store(w_ptr + (of_head + row)[:, None] * FORM.key_dim + column[None, :], w.to(OPERAND), mask=keep)
    for channel in tl.static_range(0, VALUE_DIM, PART):
        column = channel + part
        v = _load_rows(v_ptr, v_token * FORM.unit, is_row, column, FORM.value_dim, FORM).to(OPERAND)
        u = tl.dot(by_value, v, input_precision=FORM.precision)
        keep = is_row[:, None] & (column < FORM.value_dim)[None, :]
        tl.store(
            u_ptr + (of_head + row)[:, None] * FORM.value_dim + column[None, :], u.to(OPERAND), mask=keep
        )


@triton.jit(do_not_specialize=["q_token", "q_head", "k_token", "k_head", "out_token", "out_head", "tokens"])
def _scan_chunks(
    q_ptr, k_ptr, out_ptr, slots_ptr, start_loc_ptr, seq_lens_ptr, rows_ptr,
    w_ptr, u_ptr, mix_ptr, factors_ptr,
    q_token, q_head, k_token, k_head, out_token, out_head, tokens, FORM: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one head of one request, chunk by chunk."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(start_loc_ptr + request)
    count = tl.load(start_loc_ptr + request + 1) - begin
    seq_len = tl.load(seq_lens_ptr + request)
    if count < 2:
        return
    if seq_len == 0:
        return

    OPERAND: tl.constexpr = w_ptr.dtype.element_ty
    row = tl.arange(0, FORM.chunk)
    channel = tl.arange(0, FORM.keys)
    column = tl.program_id(0) * FORM.values + tl.arange(0, FORM.values)
    is_column = column < FORM.value_dim
    slots_ptr += (tl.load(rows_ptr + request) * FORM.heads + head) * (FORM.key_dim * FORM.value_dim)
    slots_ptr += channel[:, None] * FORM.value_dim + column[None, :]
    keep = (channel < FORM.key_dim)[:, None] & is_column[None, :]
    state = tl.load(slots_ptr, mask=keep & (seq_len > count), other=0.0)

    token = begin.to(tl.int64)
    q_ptr += token * (q_token * FORM.unit) + head // FORM.shared * (q_head * FORM.unit)
    k_ptr += token * (k_token * FORM.unit) + head // FORM.shared * (k_head * FORM.unit)
    out_ptr += token * (out_token * FORM.unit) + head * (out_head * FORM.unit)
    of_head = head.to(tl.int64) * tokens + token
    w_ptr += of_head * FORM.key_dim
    u_ptr += of_head * FORM.value_dim
    mix_ptr += of_head * FORM.chunk
    factors_ptr += of_head
    plane = FORM.heads * tokens.to(tl.int64)
    for done in range(0, count, FORM.chunk):
        is_row = row < count - done
        w = _load_rows(w_ptr, FORM.key_dim, is_row, channel, FORM.key_dim, FORM)
        u = _load_rows(u_ptr, FORM.value_dim, is_row, column, FORM.value_dim, FORM)
        q = _load_rows(q_ptr, q_token * FORM.unit, is_row, channel, FORM.key_dim, FORM)
        k = _load_rows(k_ptr, k_token * FORM.unit, is_row, channel, FORM.key_dim, FORM)
        mix = _load_rows(mix_ptr, FORM.chunk, is_row, row, FORM.chunk, FORM)
        q_factor = tl.load(factors_ptr + row, mask=is_row, other=0.0)
        k_factor = tl.load(factors_ptr + plane + row, mask=is_row, other=0.0)
        decay = tl.load(factors_ptr + 2 * plane + tl.minimum(FORM.chunk, count - done) - 1)

        before = state.to(OPERAND)
        added = u.to(tl.float32) - tl.dot(w, before, input_precision=FORM.precision)
        out = tl.dot(q.to(OPERAND), before, input_precision=FORM.precision) * q_factor[:, None]
        out = tl.dot(mix, added.to(OPERAND), out, input_precision=FORM.precision)
        by_key = (added * k_factor[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(k.to(OPERAND)), by_key, state * decay, input_precision=FORM.precision)
        out_at = row[:, None] * (out_token * FORM.unit) + column[None, :]
        out_keep = is_row[:, None] & is_column[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_keep)

        q_ptr += FORM.chunk * FORM.unit * q_token
        k_ptr += FORM.chunk * FORM.unit * k_token
        out_ptr += FORM.chunk * FORM.unit * out_token
        w_ptr += FORM.chunk * FORM.key_dim
        u_ptr += FORM.chunk * FORM.value_dim
        mix_ptr += FORM.chunk * FORM.chunk
        factors_ptr += FORM.chunk
    tl.store(slots_ptr, state, mask=keep)


def operand_type(*tensors: Tensor) -> tuple[torch.dtype, str]:
    """Return the type of products' operands, and how tensor cores multiply them if they are float32."""
    types = {tensor.dtype for tensor in tensors}
    if types == {torch.bfloat16}:
        return torch.bfloat16, "tf32"
    return torch.float32, "tf32x3" if torch.float32 in types else "tf32"


class Tiles(NamedTuple):
    """Tokens of a chunk, columns of V in a program of `_scan_chunks`, and its chunks in flight."""

    chunk: int
    values: int
    stages: int


def tiles_of(query: Tensor, key: Tensor, value: Tensor) -> Tiles | None:
    """Return the tiles of a scan; None: K is too large for one.

    `_scan_chunks` holds three tiles of a chunk's keys in the 99 KB of shared memory that a CTA of compute
    capability 8.6 has, and their rows and a state in registers.
    """
    keys = padded(key.shape[2])
    if operand_type(query, key, value)[0].itemsize == 2:
        return Tiles(64, 32, 2) if keys <= 128 else Tiles(32, 16, 1) if keys <= 256 else None
    return Tiles(32, 16, 2) if keys <= 64 else Tiles(16, 16, 2) if keys <= 128 else None


def padded(key_dim: int) -> int:
    return max(PART.value, triton.next_power_of_2(key_dim))


def scan_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    slots: Tensor,
    batch: StateBatch,
    output: Tensor,
    tiles: Tiles,
) -> None:
    """Compute the requests with more than one token; see `gated_delta_rule`."""
    tokens, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[1:]
    requests = len(batch.seq_lens)
    operand, precision = operand_type(query, key, value)
    keys = padded(key_dim)
    chunk, values, stages = tiles
    # The systems of 64 tokens take more registers where all sums lie in registers.
    many = chunk == 64 and keeps_sums_in_registers(compute_capability(value.device))
    warps = 8 if many else 4
    unit = stride_unit(query, key, value, output)
    form = ScanForm(
        heads=heads,
        shared=heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        keys=keys,
        values=values,
        chunk=chunk,
        doublings=(chunk // BLOCK).bit_length() - 1,
        epsilon=EPSILON,
        precision=precision,
        unit=unit,
    )
    w, u, mix = (
        torch.empty(heads, tokens, width, dtype=operand, device=value.device)
        for width in (key_dim, value_dim, chunk)
    )
    factors = torch.empty(3, heads, tokens, dtype=torch.float32, device=value.device)
    q_strides, k_strides, v_strides, out_strides = (
        in_units(each, unit) for each in (query, key, value, output)
    )
    _solve_chunks[(heads, tokens // chunk + requests)](
        query, key, value, log_decay, rate, batch.query_start_loc, batch.seq_lens, w, u, mix, factors,
        *q_strides, *k_strides, *v_strides, *token_and_head(log_decay), *token_and_head(rate),
        tokens, requests, form, num_warps=warps,
    )  # fmt: skip
    _scan_chunks[(triton.cdiv(value_dim, values), heads, requests)](
        query, key, output, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, w, u, mix,
        factors, *q_strides, *k_strides, *out_strides, tokens, form, num_warps=warps, num_stages=stages,
    )  # fmt: skip
