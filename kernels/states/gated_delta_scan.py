"""Prompts of the gated delta rule, some tokens at a time on tensor cores; Triton.

Arguments are those of `gated_delta_rule.py`. A chunk is C tokens of a request
that has more than one token in the step. With k and q unit vectors (q scaled), A[t] the sum of log decays up
to token t of the chunk and L[t, j] = exp(A[t] - A[j]) for j <= t, the tokens add to S along their keys

    added = (I + M)^-1 (b v - b exp(A) k S)         M[t, j] = b[t] L[t, j] k[t] · k[j]  for j < t
          = u - w S                                 u = (I + M)^-1 b v,  w = (I + M)^-1 b exp(A) k
    out   = exp(A) q S + (L * q k^T) added
    S     = exp(A[C-1]) S + (exp(A[C-1] - A) k)^T added

`gated_delta_systems.py` computes w, u and L * q k^T of all chunks at once. `_scan_chunks` goes through the
chunks of a request with some columns of one head's S in registers.

With one decay for each head, lengths of k and q, decays and rates are factors of rows and columns. They are
applied to products, whose operands are then what the caller gave, and C is 64. With a decay for each channel
(Kimi) they are not, so C is 16, and q and k come with their decays from the first kernel.

If q, k and v are bf16, the operands of products are bf16, as in flash-linear-attention: w, u, S, `added` and
L * q k^T are rounded to bf16; sums, and S from chunk to chunk, are float32. Otherwise operands are float32
and are multiplied as tf32, or as three tf32 products if q, k or v are float32. The inverse takes three.

A workspace has K + V + C elements for each token and head, and 3 numbers or 2 K elements more.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability, keeps_sums_in_registers
from ..triton_imports import tl, triton
from .batch import StateBatch
from .gated_delta_systems import (
    BLOCK,
    EPSILON,
    PART,
    ScanForm,
    Strides,
    chunk_number,
    load_rows,
    solve_channel_chunks,
    solve_chunks,
)
from .row_strides import ALIGNMENT, token_and_head


@triton.jit(do_not_specialize=["tokens"])
def _scan_chunks(
    q_ptr, k_ptr, out_ptr, slots_ptr, start_loc_ptr, seq_lens_ptr, rows_ptr,
    w_ptr, u_ptr, mix_ptr, factors_ptr,
    STRIDES, tokens, FORM: tl.constexpr,
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
    column = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    is_column = column < FORM.value_dim
    slots_ptr += (tl.load(rows_ptr + request) * FORM.heads + head) * (FORM.key_dim * FORM.value_dim)
    slots_ptr += channel[:, None] * FORM.value_dim + column[None, :]
    keep = (channel < FORM.key_dim)[:, None] & is_column[None, :]
    state = tl.load(slots_ptr, mask=keep & (seq_len > count), other=0.0)

    token = begin.to(tl.int64)
    q_ptr += token * STRIDES.q_token + head // FORM.shared * STRIDES.q_head
    k_ptr += token * STRIDES.k_token + head // FORM.shared * STRIDES.k_head
    out_ptr += token * STRIDES.out_token + head * STRIDES.out_head
    of_head = head.to(tl.int64) * tokens + token
    w_ptr += of_head * FORM.key_dim
    u_ptr += of_head * FORM.value_dim
    mix_ptr += of_head * FORM.chunk
    if FORM.by_channel:
        number = chunk_number(request, begin, FORM.chunk)
        factors_ptr += (number * FORM.heads + head) * FORM.key_dim + channel
    else:
        factors_ptr += of_head
    plane = FORM.heads * tokens.to(tl.int64)
    for done in range(0, count, FORM.chunk):
        is_row = row < count - done
        w = load_rows(w_ptr, FORM.key_dim, is_row, channel, FORM.key_dim, FORM)
        u = load_rows(u_ptr, FORM.value_dim, is_row, column, FORM.value_dim, FORM)
        q = load_rows(q_ptr, STRIDES.q_token, is_row, channel, FORM.key_dim, FORM)
        k = load_rows(k_ptr, STRIDES.k_token, is_row, channel, FORM.key_dim, FORM)
        mix = load_rows(mix_ptr, FORM.chunk, is_row, row, FORM.chunk, FORM)
        before = state.to(OPERAND)
        added = u.to(tl.float32) - tl.dot(w, before, input_precision=FORM.precision)
        out = tl.dot(q.to(OPERAND), before, input_precision=FORM.precision)
        by_key = added
        if FORM.by_channel:
            state *= tl.load(factors_ptr, mask=channel < FORM.key_dim, other=0.0)[:, None]
            factors_ptr += FORM.heads * FORM.key_dim
        else:
            out *= tl.load(factors_ptr + row, mask=is_row, other=0.0)[:, None]
            by_key *= tl.load(factors_ptr + plane + row, mask=is_row, other=0.0)[:, None]
            state *= tl.load(factors_ptr + 2 * plane + tl.minimum(FORM.chunk, count - done) - 1)
            factors_ptr += FORM.chunk
        out = tl.dot(mix, added.to(OPERAND), out, input_precision=FORM.precision)
        by_key = by_key.to(OPERAND)
        state = tl.dot(tl.trans(k.to(OPERAND)), by_key, state, input_precision=FORM.precision)
        out_at = row[:, None] * STRIDES.out_token + column[None, :]
        out_keep = is_row[:, None] & is_column[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_keep)

        q_ptr += FORM.chunk * STRIDES.q_token
        k_ptr += FORM.chunk * STRIDES.k_token
        out_ptr += FORM.chunk * STRIDES.out_token
        w_ptr += FORM.chunk * FORM.key_dim
        u_ptr += FORM.chunk * FORM.value_dim
        mix_ptr += FORM.chunk * FORM.chunk
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


def tiles_of(query: Tensor, key: Tensor, value: Tensor, by_channel: bool) -> Tiles | None:
    """Return the tiles of a scan; None: K is too large for one, or rows do not stay aligned.

    `_scan_chunks` holds three tiles of a chunk's keys in the 99 KB of shared memory that a CTA of compute
    capability 8.6 has, and their rows and a state in registers. With a decay for each channel a chunk is a
    block.
    """
    keys = padded(key.shape[2])
    wide = operand_type(query, key, value)[0].itemsize == 4
    if key.shape[2] % ALIGNMENT or value.shape[2] % ALIGNMENT:
        return None
    if keys <= 128:
        values = 16 if wide or (by_channel and keys <= 64) else 32
        chunk = 64 if not wide else 32 if keys <= 64 else BLOCK
        return Tiles(BLOCK if by_channel else chunk, values, 2)
    return Tiles(32, 16, 1) if keys <= 256 and not wide and not by_channel else None


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
    strides: Strides,
    tiles: Tiles,
) -> None:
    """Compute the requests with more than one token; see `gated_delta_rule`."""
    tokens, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[1:]
    requests = len(batch.seq_lens)
    by_channel = log_decay.ndim == 3
    operand, precision = operand_type(query, key, value)
    chunk, values, stages = tiles
    # The systems of 64 tokens take more registers where all sums lie in registers.
    many = chunk == 64 and keeps_sums_in_registers(compute_capability(value.device))
    warps = 8 if many else 4
    form = ScanForm(
        heads=heads,
        shared=heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        keys=padded(key_dim),
        columns=values,
        chunk=chunk,
        doublings=(chunk // BLOCK).bit_length() - 1,
        epsilon=EPSILON,
        precision=precision,
        by_channel=by_channel,
    )
    grid = (heads, tokens // chunk + requests)
    w, u, mix = (
        torch.empty(heads, tokens, width, dtype=operand, device=value.device)
        for width in (key_dim, value_dim, chunk)
    )
    inputs = query, key, value, log_decay, rate, batch.query_start_loc, batch.seq_lens
    sizes = strides, tokens, requests, form
    if by_channel:
        factors = torch.empty(grid[1], heads, key_dim, dtype=torch.float32, device=value.device)
        scaled = [torch.empty(tokens, heads, key_dim, dtype=operand, device=value.device) for _ in range(2)]
        solve_channel_chunks[grid](*inputs, w, u, mix, factors, *scaled, *sizes, num_warps=warps)
        query, key = scaled
        form = form._replace(shared=1)
        token, head = token_and_head(query)
        strides = strides._replace(q_token=token, q_head=head, k_token=token, k_head=head)
    else:
        factors = torch.empty(3, heads, tokens, dtype=torch.float32, device=value.device)
        solve_chunks[grid](*inputs, w, u, mix, factors, *sizes, num_warps=warps)
    _scan_chunks[(triton.cdiv(value_dim, values), heads, requests)](
        query, key, output, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, w, u, mix,
        factors, strides, tokens, form, num_warps=warps, num_stages=stages,
    )  # fmt: skip
