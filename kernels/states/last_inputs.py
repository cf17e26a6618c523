"""The last inputs of each channel, for every token of a step; Triton.

    x         [T, C]           bf16, fp16 or fp32; contiguous channels, any stride of tokens
    slots     [rows, C, W]     x's dtype, the oldest input first; changed in place
    output    [T, C, W + 1]    contiguous; written: the W inputs before each token, then its own

The reference is `layouts/states/last_inputs.py`. One launch copies windows, another one stores the new ones.
"""

from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .kept_inputs import keep_inputs, kept_input, token_stride
from .requests import requests_of

TOKENS, CHANNELS = 4, 256
"""Block of a program."""


@triton.jit(do_not_specialize=["T", "R"])
def _windows(
    x, slots, query_start_loc, seq_lens, request_rows, output, x_stride, C, T, R,
    W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DECODE_ONLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Copy the windows of a block of tokens; grid (blocks of tokens, blocks of channels)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists, first, row, has_past = requests_of(token, query_start_loc, seq_lens, request_rows, R, DECODE_ONLY)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    keep = exists[:, None] & (channel < C)
    # Padding of a step of single tokens gets zeros.
    stored = (token < T)[:, None] & (channel < C) if DECODE_ONLY else keep
    to = output + (token[:, None].to(tl.int64) * C + channel) * (W + 1)
    place = (token - first)[:, None]
    for i in tl.static_range(W + 1):
        number = kept_input(
            x, slots, first[:, None], place - W + i, row[:, None], channel, x_stride, keep,
            has_past[:, None], C, W,
        )  # fmt: skip
        tl.store(to + i, number, mask=stored)


def last_inputs(x: Tensor, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
    """Copy a step's windows and change the slots of its requests; arguments are as in the file's docstring.

    Nothing is written for padding, but zeros in a step of single tokens.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, channels = x.shape
    pdl = compute_capability(x.device) >= (9, 0)
    _windows[(triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS))](
        x, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, output, token_stride(x),
        channels, tokens, len(batch.seq_lens),
        W=slots.shape[2], TOKENS=TOKENS, CHANNELS=CHANNELS, DECODE_ONLY=batch.decode_only, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    keep_inputs(x, slots, batch)
