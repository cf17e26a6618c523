"""Mamba 2 over slots: one more token for each of many requests, and chunks of prompts; Triton.

    x          [T, H, P]               bf16, fp16 or fp32
    step       [T, H]                  d, positive
    b, c       [T, G, N]               x's dtype; each group serves H / G consecutive heads
    a          [H]                     negative
    d          [H], or None            the part of x that passes by the state
    slots      fp32 [rows, H, P, N]    changed in place
    output     [T, H, P]               contiguous; written

    S ← exp(d a) S + d x b^T           y = S c + D x          for each head

The reference is `layouts/states/mamba2.py`. The last dimension of x, b and c is contiguous; other strides are
any.

**One token.** A program has 8 KB of one head's state in registers, reads it once and writes it once. The time
is that of these bytes, 8 P N a head and request.

**Prompts.** A program has one head's state of some of the P channels in registers. It goes through the tokens
of one request in chunks of Q, then through those of another one. With A[t] the sum of d a up to t:

    M[t, j] = exp(A[t] - A[j]) d[j] (c[t] · b[j])   for j <= t       A falls: no exponent is positive
    y[t]    = sum over j of M[t, j] x[j] + exp(A[t]) S c[t] + D x[t]
    S       ← exp(A[Q]) S + sum over j of exp(A[Q] - A[j]) d[j] x[j] b[j]^T

In bf16 the operands x, b and c are exact, and c b^T is one product. In the others one operand is in fp32: M,
S, and x with its factors. It is split into the number in bf16 and the rest in bf16. These two products are as
fast as one in tf32, and leave errors of 2^-17 of each term rather than 2^-11, so that a state is that of the
recurrence in fp32, wherever a prompt is cut. fp16 and fp32 are multiplied in fp32, without tensor cores.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .kept_inputs import token_stride
from .requests import scanned_request, tokens_of

STEP_NUMBERS = 2048
"""Of a state in a program, for single tokens."""
SCAN_PROGRAMS = 1024
"""Enough for every GPU, at some four at once on each SM. Each goes through several requests."""


class Form(NamedTuple):
    """Compile-time parameters.

    shared:          heads of a group
    channels, state: P of a program, and N, as powers of two
    chunk:           Q
    split:           whether operands in fp32 are split into two of bf16
    """

    heads: int
    shared: int
    head_dim: int
    state_dim: int
    channels: int
    state: int
    chunk: int
    split: bool
    skip: bool
    decode_only: bool
    pdl: bool


class Strides(NamedTuple):
    """Of tokens and heads or groups, in numbers."""

    x_token: int
    x_head: int
    step_token: int
    b_token: int
    b_group: int
    c_token: int
    c_group: int
    a: int
    d: int


@triton.jit
def _step(
    x, step, b, c, a, d, slots, query_start_loc, seq_lens, request_rows, output, STRIDES, FORM: tl.constexpr,
):  # fmt: skip
    """Compute a token of one request; grid (requests, heads, blocks of channels)."""
    P: tl.constexpr = FORM.channels
    N: tl.constexpr = FORM.state
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    request, head = tl.program_id(0), tl.program_id(1)
    token, count, has_past = tokens_of(request, query_start_loc, seq_lens, FORM.decode_only)
    token = token.to(tl.int64)
    channel = tl.program_id(2) * P + tl.arange(0, P)
    is_channel = channel < FORM.head_dim
    to = output + (token * FORM.heads + head) * FORM.head_dim + channel
    if FORM.decode_only and count == 0:
        tl.store(to, tl.zeros([P], output.dtype.element_ty), mask=is_channel)
    if count != 1:
        return
    n = tl.arange(0, N)
    is_n = n < FORM.state_dim
    row = tl.load(request_rows + request)
    at = slots + ((row * FORM.heads + head) * FORM.head_dim + channel[:, None]) * FORM.state_dim + n[None, :]
    keep = is_channel[:, None] & is_n[None, :]
    state = tl.load(at, mask=keep & has_past, other=0.0)
    group = head // FORM.shared
    b_row = tl.load(b + token * STRIDES.b_token + group * STRIDES.b_group + n, mask=is_n, other=0.0)
    c_row = tl.load(c + token * STRIDES.c_token + group * STRIDES.c_group + n, mask=is_n, other=0.0)
    x_row = tl.load(x + token * STRIDES.x_token + head * STRIDES.x_head + channel, mask=is_channel, other=0.0)
    x_row = x_row.to(tl.float32)
    size = tl.load(step + token * STRIDES.step_token + head).to(tl.float32)
    decay = tl.exp(size * tl.load(a + head * STRIDES.a).to(tl.float32))
    state = state * decay + (size * x_row)[:, None] * b_row.to(tl.float32)[None, :]
    tl.store(at, state, mask=keep)
    y = tl.sum(state * c_row.to(tl.float32)[None, :], 1)
    if FORM.skip:
        y += x_row * tl.load(d + head * STRIDES.d).to(tl.float32)
    tl.store(to, y.to(output.dtype.element_ty), mask=is_channel)


@triton.jit
def _add_product(total, left, right, SPLIT: tl.constexpr, LEFT_IS_EXACT: tl.constexpr):
    """Add left @ right; with SPLIT one operand is in bf16, and the other one in fp32 is split in two."""
    if SPLIT:
        if LEFT_IS_EXACT:
            high = right.to(tl.bfloat16)
            rest = (right - high.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(left, rest, total)
            total = tl.dot(left, high, total)
        else:
            high = left.to(tl.bfloat16)
            rest = (left - high.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(rest, right, total)
            total = tl.dot(high, right, total)
    else:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["R"])
def _scan(
    x, step, b, c, a, d, slots, query_start_loc, seq_lens, request_rows, output, R, STRIDES,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a head of every LANES-th prompt; grid (LANES, heads, blocks of channels)."""
    P: tl.constexpr = FORM.channels
    N: tl.constexpr = FORM.state
    Q: tl.constexpr = FORM.chunk
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    group = head // FORM.shared
    channel = tl.program_id(2) * P + tl.arange(0, P)
    n = tl.arange(0, N)
    is_channel = (channel < FORM.head_dim)[None, :]
    is_n = (n < FORM.state_dim)[None, :]
    keep = tl.trans(is_channel) & is_n
    rate = tl.load(a + head * STRIDES.a).to(tl.float32)
    skip = 0.0
    if FORM.skip:
        skip = tl.load(d + head * STRIDES.d).to(tl.float32)
    x += head * STRIDES.x_head + channel[None, :]
    b += group * STRIDES.b_group + n[None, :]
    c += group * STRIDES.c_group + n[None, :]
    step += head
    output += head * FORM.head_dim + channel[None, :]

    index = tl.program_id(0)
    request = scanned_request(index, query_start_loc, seq_lens, R)
    while request < R:
        first, count, has_past = tokens_of(request, query_start_loc, seq_lens, False)
        row = tl.load(request_rows + request)
        of_head = slots + (row * FORM.heads + head) * (FORM.head_dim * FORM.state_dim)
        at = of_head + channel[:, None] * FORM.state_dim + n[None, :]
        state = tl.load(at, mask=keep & has_past, other=0.0)
        for start in tl.range(0, count, Q):
            place = start + tl.arange(0, Q)
            is_token = place < count
            token = (first + place).to(tl.int64)
            is_row = is_token[:, None]
            size = tl.load(step + token * STRIDES.step_token, mask=is_token, other=0.0).to(tl.float32)
            b_rows = tl.load(b + token[:, None] * STRIDES.b_token, mask=is_row & is_n, other=0.0)
            c_rows = tl.load(c + token[:, None] * STRIDES.c_token, mask=is_row & is_n, other=0.0)
            x_rows = tl.load(x + token[:, None] * STRIDES.x_token, mask=is_row & is_channel, other=0.0)
            decayed = tl.cumsum(size * rate, 0)
            until_end = tl.sum(size * rate, 0)

            y = _add_product(tl.zeros([Q, P], tl.float32), c_rows, tl.trans(state), FORM.split, True)
            y *= tl.exp(decayed)[:, None]
            if FORM.split:
                mixed = tl.dot(c_rows, tl.trans(b_rows))
            else:
                mixed = _add_product(tl.zeros([Q, Q], tl.float32), c_rows, tl.trans(b_rows), False, True)
            earlier = place[:, None] >= place[None, :]
            between = tl.where(earlier, decayed[:, None] - decayed[None, :], -float("inf"))
            mixed *= tl.exp(between) * size[None, :]
            y = _add_product(y, mixed, x_rows, FORM.split, False)
            if FORM.skip:
                y += skip * x_rows.to(tl.float32)
            tl.store(
                output + token[:, None] * (FORM.heads * FORM.head_dim),
                y.to(output.dtype.element_ty),
                mask=is_row & is_channel,
            )
            # Sums in another order than `decayed`: a difference may lie just above 0.
            left = size * tl.exp(tl.minimum(until_end - decayed, 0.0))
            added = x_rows.to(tl.float32) * left[:, None]
            state = _add_product(state * tl.exp(until_end), tl.trans(added), b_rows, FORM.split, False)
        tl.store(at, state, mask=keep)
        index += tl.num_programs(0)
        request = scanned_request(index, query_start_loc, seq_lens, R)


def scan_sizes(head_dim: int, state_dim: int, split: bool) -> tuple[int, int, int]:
    """Return Q, and P and N of a program, for products of bf16 (split) or of fp32.

    Products of 16 or 32 rows are computed by mma.sync on every GPU. With 64 rows Hopper takes wgmma, and with
    Triton 3.6 all chunks after a prompt's first one were then wrong if the rows of b and c began at addresses
    that are not multiples of 16 bytes. The sizes are the largest that need no more registers than there are.
    """
    state = max(16, triton.next_power_of_2(state_dim))
    if not split or state > 128:
        return 16, 16, state
    return 32, 32 if head_dim > 16 else 16, state


def mamba2(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor | None,
    slots: Tensor,
    batch: StateBatch,
    output: Tensor,
) -> None:
    """Compute a step's tokens and change the slots of its requests; arguments are as in the file's docstring.

    Nothing is written for padding, but zeros in a step of single tokens.
    """
    x, b, c = (each if each.stride(2) == 1 else each.contiguous() for each in (x, b, c))
    step = step if step.stride(1) == 1 else step.contiguous()
    heads, head_dim = x.shape[1:]
    state_dim = b.shape[2]
    requests = len(batch.seq_lens)
    pdl = compute_capability(x.device) >= (9, 0)
    strides = Strides(
        token_stride(x), x.stride(1), token_stride(step), token_stride(b), b.stride(1), token_stride(c),
        c.stride(1), a.stride(0), 0 if d is None else d.stride(0),
    )  # fmt: skip
    given = (
        x, step, b, c, a, d, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, output,
    )  # fmt: skip
    state = triton.next_power_of_2(state_dim)
    channels = max(1, min(STEP_NUMBERS // state, triton.next_power_of_2(head_dim)))
    form = Form(
        heads=heads,
        shared=heads // b.shape[1],
        head_dim=head_dim,
        state_dim=state_dim,
        channels=channels,
        state=state,
        chunk=0,
        split=x.dtype == torch.bfloat16 and x.is_cuda,
        skip=d is not None,
        decode_only=batch.decode_only,
        pdl=pdl,
    )
    grid = requests, heads, triton.cdiv(head_dim, channels)
    _step[grid](*given, strides, form, num_warps=4, launch_pdl=pdl)
    if batch.decode_only:
        return
    chunk, channels, state = scan_sizes(head_dim, state_dim, form.split)
    form = form._replace(channels=channels, state=state, chunk=chunk)
    blocks = triton.cdiv(head_dim, channels)
    lanes = min(requests, triton.cdiv(SCAN_PROGRAMS, heads * blocks))
    warps, stages = (4, 2) if form.split else (8, 1)
    _scan[(lanes, heads, blocks)](
        *given, requests, strides, form, num_warps=warps, num_stages=stages, launch_pdl=pdl
    )
