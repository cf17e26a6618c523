"""The gated delta rule on a GPU: one more token for each of many requests, and whole prompts; Triton.

The reference, and what the numbers mean, are in `layouts/states/gated_delta_rule.py`.

    query, key   [T, H_k, K]               bf16, fp16 or fp32; of any length, they are made unit vectors here
    value        [T, H, V]                 likewise
    log_decay    [T, H], or [T, H, K]      at most 0
    rate         [T, H]
    slots        float32 [rows, H, K, V]   contiguous; the states of the step's requests change in place
    output       [T, H, V]                 any of these types; written for every token of a request

A step takes a request's state S [K, V] once from memory and brings it back. A program has some columns of one
head's state in registers, so S is read for k^T S and q^T S together, before it changes:

    d   = b (v - a k^T S)
    out = a q^T S + (q · k) d
    S   = a S + k d^T

The states' bytes take 88% of the time with 128 requests, 61% with 8 (H = 32, K = V = 128, by the speed of a
copy on the same H200, `tests/bench/kernels/states.py`, November 2026).

Requests with more than one token are left to `gated_delta_scan.py`. If K is too large for a scan, or K or V
is no multiple of 16, prompts take the step's kernel too, token by token.
"""

from typing import NamedTuple

from torch import Tensor

from ..triton_imports import tl, triton
from .batch import StateBatch
from .gated_delta_scan import scan_prompts, tiles_of
from .gated_delta_systems import EPSILON, Strides
from .row_strides import token_and_head, with_steady_rows

STEP_VALUES, STEP_WARPS = 64, 4
"""Columns of a state in a program, and its warps: 256 bytes of each row. On an H200 32 columns take 5% longer
with 128 requests, and .3 of 4.5 µs less with one."""
STEP_NUMBERS = 128 * STEP_VALUES
"""The most of a state that a program's registers hold: of more than 128 channels it has fewer columns."""


class StepForm(NamedTuple):
    """Compile-time parameters of `_step`.

    shared:     heads of values that a head of keys serves
    keys:       K as a power of two
    columns:    of V in a program
    by_channel: there is a decay for each channel
    prompts:    requests with more than one token are computed too
    """

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    keys: int
    columns: int
    epsilon: float
    by_channel: bool
    prompts: bool


@triton.jit
def _advance(state, q, k, v, decay, rate, FORM: tl.constexpr):
    """Compute a token: return its output [columns] and the next state."""
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + FORM.epsilon) * FORM.key_dim**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + FORM.epsilon)
    state = state * tl.exp(decay)[:, None] if FORM.by_channel else state * tl.exp(decay)
    added = (v - tl.sum(state * k[:, None], axis=0)) * rate
    output = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k, axis=0) * added
    return output, state + k[:, None] * added[None, :]


@triton.jit(do_not_specialize=["decode_only"])
def _step(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, out_ptr, slots_ptr, start_loc_ptr, seq_lens_ptr, rows_ptr,
    STRIDES, decode_only, FORM: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one head of one request."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    row = tl.load(rows_ptr + request)
    first, count = request, 1
    if decode_only == 0:
        first = tl.load(start_loc_ptr + request)
        count = tl.load(start_loc_ptr + request + 1) - first
    if count < 1:
        return
    if not FORM.prompts and count > 1:
        return

    channel = tl.arange(0, FORM.keys)
    column = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    is_channel = channel < FORM.key_dim
    is_column = column < FORM.value_dim
    q_ptr += head // FORM.shared * STRIDES.q_head + channel
    k_ptr += head // FORM.shared * STRIDES.k_head + channel
    v_ptr += head * STRIDES.v_head + column
    out_ptr += head * STRIDES.out_head + column
    decay_ptr += head * STRIDES.decay_head
    rate_ptr += head * STRIDES.rate_head
    if FORM.by_channel:
        decay_ptr += channel
    token = first.to(tl.int64)
    if seq_len == 0:
        zeros = tl.where(is_column, 0.0, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * STRIDES.out_token, zeros, mask=is_column)
        return

    slots_ptr += (row * FORM.heads + head) * (FORM.key_dim * FORM.value_dim)
    at = channel[:, None] * FORM.value_dim + column[None, :]
    keep = is_channel[:, None] & is_column[None, :]
    state = tl.load(slots_ptr + at, mask=keep & (seq_len > count), other=0.0)
    for _ in range(count if FORM.prompts else 1):
        q = tl.load(q_ptr + token * STRIDES.q_token, mask=is_channel, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * STRIDES.k_token, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * STRIDES.v_token, mask=is_column, other=0.0).to(tl.float32)
        if FORM.by_channel:
            decay = tl.load(decay_ptr + token * STRIDES.decay_token, mask=is_channel, other=0.0)
        else:
            decay = tl.load(decay_ptr + token * STRIDES.decay_token)
        rate = tl.load(rate_ptr + token * STRIDES.rate_token).to(tl.float32)
        output, state = _advance(state, q, k, v, decay.to(tl.float32), rate, FORM)
        output = output.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * STRIDES.out_token, output, mask=is_column)
        token += 1
    tl.store(slots_ptr + at, state, mask=keep)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    slots: Tensor,
    batch: StateBatch,
    output: Tensor,
) -> None:
    """Write `output` and the requests' `slots`; arguments are as in the file's docstring.

    Tokens of no request keep what `output` holds, but in a decode-only batch get zeros. The kernels compile
    once for given heads, K, V and types; they specialize on no running size. A launch takes its workspace
    from torch's allocator, as a CUDA graph's capture permits.
    """
    inputs = (query, key, value, log_decay, rate)
    query, key, value, log_decay, rate = map(with_steady_rows, inputs)
    by_channel = log_decay.ndim == 3
    tiles = tiles_of(query, key, value, by_channel)
    heads, value_dim = value.shape[1:]
    key_heads, key_dim = key.shape[1:]
    keys = triton.next_power_of_2(key_dim)
    values = min(STEP_VALUES, STEP_NUMBERS // keys, triton.next_power_of_2(value_dim))
    form = StepForm(
        heads=heads,
        shared=heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        keys=keys,
        columns=values,
        epsilon=EPSILON,
        by_channel=by_channel,
        prompts=tiles is None and not batch.decode_only,
    )
    of_all = (query, key, value, log_decay, rate, output)
    strides = Strides(*(stride for each in of_all for stride in token_and_head(each)))
    _step[(triton.cdiv(value_dim, values), heads, len(batch.seq_lens))](
        query, key, value, log_decay, rate, output, slots, batch.query_start_loc, batch.seq_lens,
        batch.request_rows, strides, int(batch.decode_only), form, num_warps=STEP_WARPS,
    )  # fmt: skip
    if not batch.decode_only and tiles is not None:
        scan_prompts(query, key, value, log_decay, rate, slots, batch, output, strides, tiles)
