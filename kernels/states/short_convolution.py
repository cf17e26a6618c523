"""Short causal convolution over each channel, whose state is the last W - 1 inputs; Triton.

    x         [T, C]             bf16, fp16 or fp32; contiguous channels, any stride of tokens
    weight    [C, W]             the last column is for the newest input
    bias      [C], or None
    slots     [rows, C, W - 1]   x's dtype, the oldest input first; changed in place
    output    [T, C]             contiguous; written

    output[t] = sum over i < W of weight[:, i] * x[t - W + 1 + i] + bias

The reference is `layouts/states/short_convolution.py`. Sums are in fp32. In a step of single tokens, one
launch reads a request's window and stores the output and the moved window. With prompts in the step, a
program computes a block of tokens and channels, and a second launch (`kept_inputs.py`) stores the new
windows. Either way the time is that of the bytes: x, output, and both windows of each request.
"""

from typing import NamedTuple

from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .kept_inputs import keep_inputs, kept_input, token_stride
from .requests import requests_of, tokens_of

STEP_CHANNELS = 256
"""Channels of a program for single tokens."""
TOKENS, CHANNELS = 16, 128
"""Block of a program in a step with prompts."""


class Form(NamedTuple):
    """Compile-time parameters; width: W."""

    width: int
    tokens: int
    channels: int
    bias: bool
    pdl: bool


@triton.jit
def _step(
    x, weight, bias, slots, query_start_loc, seq_lens, request_rows, output, x_stride, weight_stride, C,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute a token of one request and move its window; grid (requests, blocks of channels)."""
    W: tl.constexpr = FORM.width
    CHANNELS: tl.constexpr = FORM.channels
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    token, count, has_past = tokens_of(request, query_start_loc, seq_lens, True)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    keep = channel < C
    to = output + token.to(tl.int64) * C + channel
    if count == 0:
        tl.store(to, tl.zeros([CHANNELS], output.dtype.element_ty), mask=keep)
        return
    at = slots + (tl.load(request_rows + request) * C + channel) * (W - 1)
    newest = tl.load(x + token.to(tl.int64) * x_stride + channel, mask=keep, other=0.0)
    window = ()
    for i in tl.static_range(W - 1):
        old = tl.load(at + i, mask=keep & has_past, other=0.0)
        window = window + (old,)  # type: ignore[assignment] # noqa: RUF005
    window = window + (newest,)  # type: ignore[assignment] # noqa: RUF005
    total = tl.zeros([CHANNELS], tl.float32)
    for i in tl.static_range(W):
        factor = tl.load(weight + channel * weight_stride + i, mask=keep, other=0.0)
        total += window[i].to(tl.float32) * factor.to(tl.float32)
    if FORM.bias:
        total += tl.load(bias + channel, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, total.to(output.dtype.element_ty), mask=keep)
    # No thread stores before all have loaded.
    tl.debug_barrier()
    for i in tl.static_range(W - 1):
        tl.store(at + i, window[i + 1], mask=keep)


@triton.jit(do_not_specialize=["R"])
def _outputs(
    x, weight, bias, slots, query_start_loc, seq_lens, request_rows, output, x_stride, weight_stride, C, R,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute a block of tokens of any requests; grid (blocks of tokens, blocks of channels)."""
    W: tl.constexpr = FORM.width
    TOKENS: tl.constexpr = FORM.tokens
    CHANNELS: tl.constexpr = FORM.channels
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists, first, row, has_past = requests_of(token, query_start_loc, seq_lens, request_rows, R, False)
    place = token - first
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    keep = exists[:, None] & (channel < C)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    needs_state = tl.sum((exists & has_past & (place < W - 1)).to(tl.int32), 0) > 0
    for i in tl.static_range(W):
        factor = tl.load(weight + channel * weight_stride + i, mask=channel < C, other=0.0)
        back = place[:, None] - (W - 1 - i)
        if needs_state:
            number = kept_input(
                x, slots, first[:, None], back, row[:, None], channel, x_stride, keep, has_past[:, None],
                C, W - 1,
            )  # fmt: skip
        else:
            at = (first[:, None] + back).to(tl.int64) * x_stride + channel
            number = tl.load(x + at, mask=keep & (back >= 0), other=0.0)
        total += number.to(tl.float32) * factor.to(tl.float32)
    if FORM.bias:
        total += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    to = output + token[:, None].to(tl.int64) * C + channel
    tl.store(to, total.to(output.dtype.element_ty), mask=keep)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, batch: StateBatch, output: Tensor
) -> None:
    """Compute a step's tokens and change the slots of its requests; arguments are as in the file's docstring.

    Nothing is written for padding, but zeros in a step of single tokens.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    tokens, channels = x.shape
    requests = len(batch.seq_lens)
    pdl = compute_capability(x.device) >= (9, 0)
    form = Form(weight.shape[1], TOKENS, CHANNELS, bias is not None, pdl)
    given = x, weight, bias, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, output
    strides = token_stride(x), weight.stride(0)
    if batch.decode_only:
        form = form._replace(channels=STEP_CHANNELS)
        _step[(requests, triton.cdiv(channels, STEP_CHANNELS))](
            *given, *strides, channels, form, num_warps=4, launch_pdl=pdl
        )
        return
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
    _outputs[grid](*given, *strides, channels, requests, form, num_warps=4, launch_pdl=pdl)
    keep_inputs(x, slots, batch)
