"""Mamba 1, the selective scan, over slots: single tokens, and prompts token by token; Triton.

    x, step    [T, C]               bf16, fp16 or fp32; step: d, positive
    b, c       [T, N]
    a          [C, N]               negative; contiguous N
    d          [C], or None         the part of x that passes by the state
    slots      fp32 [rows, C, N]    changed in place
    output     [T, C]               contiguous; written

    S ← exp(d a) S + d x b^T        y = S c + D x        for each channel

The reference is `layouts/states/mamba1.py`. The last dimension is contiguous; strides of tokens are any.
Every element of a state has its own decay, so no part of this is a product of matrices. A program has some
channels of a request and computes GROUP tokens after one another, whose inputs it has loaded at once. Single
tokens take the time of their bytes, 8 C N of a request's state; `a`, half of that, stays in the L2 cache.
"""

from typing import NamedTuple

from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .kept_inputs import token_stride
from .requests import tokens_of

STEP_NUMBERS, SCAN_NUMBERS = 2048, 256
"""Of a state in a program, with four warps and with one: few prompts need many programs."""
GROUP = 8


class Form(NamedTuple):
    """Compile-time parameters.

    channels, state: C of a program, and N, as powers of two
    """

    state_dim: int
    channels: int
    state: int
    group: int
    skip: bool
    decode_only: bool
    pdl: bool


class Strides(NamedTuple):
    """Of tokens; of channels for `a`."""

    x: int
    step: int
    b: int
    c: int
    a: int


@triton.jit
def _scan(
    x, step, b, c, a, d, slots, query_start_loc, seq_lens, request_rows, output, C, STRIDES,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a request; grid (requests, blocks of channels)."""
    CHANNELS: tl.constexpr = FORM.channels
    N: tl.constexpr = FORM.state
    GROUP: tl.constexpr = FORM.group
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    first, count, has_past = tokens_of(request, query_start_loc, seq_lens, FORM.decode_only)
    first = first.to(tl.int64)
    end = first + count
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    n = tl.arange(0, N)[None, :]
    is_channel = channel < C
    is_n = n < FORM.state_dim
    output += channel
    if count == 0:
        if FORM.decode_only:
            tl.store(output + first * C, tl.zeros([CHANNELS, 1], output.dtype.element_ty), mask=is_channel)
        return
    x += channel
    step += channel
    b += n
    c += n
    keep = is_channel & is_n
    rate = tl.load(a + channel * STRIDES.a + n, mask=keep, other=0.0).to(tl.float32)
    skip = tl.zeros([CHANNELS, 1], tl.float32)
    if FORM.skip:
        skip += tl.load(d + channel, mask=is_channel, other=0.0).to(tl.float32)
    at = slots + (tl.load(request_rows + request) * C + channel) * FORM.state_dim + n
    state = tl.load(at, mask=keep & has_past, other=0.0)
    for start in range(0, count, GROUP):
        inputs = ()
        for i in tl.static_range(GROUP):
            # Tokens after the last one have steps of 0, which leave the state alone.
            token = first + start + i
            exists = token < end
            inputs = inputs + (  # type: ignore[assignment] # noqa: RUF005
                tl.load(x + token * STRIDES.x, mask=is_channel & exists, other=0.0),
                tl.load(step + token * STRIDES.step, mask=is_channel & exists, other=0.0),
                tl.load(b + token * STRIDES.b, mask=is_n & exists, other=0.0),
                tl.load(c + token * STRIDES.c, mask=is_n & exists, other=0.0),
            )
        for i in tl.static_range(GROUP):
            new = inputs[4 * i].to(tl.float32)  # type: ignore[var-annotated]
            size = inputs[4 * i + 1].to(tl.float32)
            state = state * tl.exp(size * rate) + (size * new) * inputs[4 * i + 2].to(tl.float32)
            y = tl.sum(state * inputs[4 * i + 3].to(tl.float32), 1, keep_dims=True) + skip * new
            token = first + start + i
            to = output + token * C
            tl.store(to, y.to(output.dtype.element_ty), mask=is_channel & (token < end))
    tl.store(at, state, mask=keep)


def mamba1(
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
    x, step, b, c, a = (each if each.stride(1) == 1 else each.contiguous() for each in (x, step, b, c, a))
    channels, state_dim = a.shape
    state = triton.next_power_of_2(state_dim)
    numbers = STEP_NUMBERS if batch.decode_only else SCAN_NUMBERS
    form = Form(
        state_dim=state_dim,
        channels=max(1, numbers // state),
        state=state,
        group=1 if batch.decode_only else GROUP,
        skip=d is not None,
        decode_only=batch.decode_only,
        pdl=compute_capability(x.device) >= (9, 0),
    )
    strides = Strides(token_stride(x), token_stride(step), token_stride(b), token_stride(c), a.stride(0))
    _scan[(len(batch.seq_lens), triton.cdiv(channels, form.channels))](
        x, step, b, c, a, d, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, output,
        channels, strides, form, num_warps=4 if batch.decode_only else 1, launch_pdl=form.pdl,
    )  # fmt: skip
