"""The last W inputs of each channel as a state; what `short_convolution.py` and `last_inputs.py` share.

    x        [T, C]         contiguous channels
    slots    [rows, C, W]   x's dtype; the oldest input first

A step's outputs read slots and x, and only a later launch (`keep_inputs`) may change the slots: the first
tokens of a chunk, which need the old state, are computed by other programs than the last ones.
"""

from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .requests import tokens_of

CHANNELS = 256
"""Channels of a program."""


@triton.jit
def kept_input(x, slots, first, place, row, channel, x_stride, mask, has_past, C, W: tl.constexpr):
    """Load inputs of a request's channels: its token `place` in the step, or an earlier one for -W .. -1.

    slots: of all requests; first: the request's first token. Inputs before a request's first token are zeros.
    """
    of_step = place >= 0
    token = (first + place).to(tl.int64)
    new = tl.load(x + token * x_stride + channel, mask=mask & of_step, other=0.0)
    at = (row * C + channel) * W + W + place
    old = tl.load(slots + at, mask=mask & has_past & (place < 0) & (place >= -W), other=0.0)
    return tl.where(of_step, new, old)


@triton.jit
def _keep(
    x, slots, query_start_loc, seq_lens, request_rows, x_stride, C,
    W: tl.constexpr, CHANNELS: tl.constexpr, DECODE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the last W inputs of a request; grid (requests, blocks of channels)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    first, count, has_past = tokens_of(request, query_start_loc, seq_lens, DECODE_ONLY)
    if count == 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    keep = channel < C
    row = tl.load(request_rows + request)
    last = ()
    for i in tl.static_range(W):
        place = count - W + i
        number = kept_input(x, slots, first, place, row, channel, x_stride, keep, has_past, C, W)
        last = last + (number,)  # type: ignore[assignment] # noqa: RUF005
    # No thread stores before all have loaded.
    tl.debug_barrier()
    for i in tl.static_range(W):
        tl.store(slots + (row * C + channel) * W + i, last[i], mask=keep)


def keep_inputs(x: Tensor, slots: Tensor, batch: StateBatch) -> None:
    """Change the slots of the step's requests; after the launch that computes the outputs."""
    requests, channels = len(batch.seq_lens), x.shape[1]
    pdl = compute_capability(x.device) >= (9, 0)
    _keep[(requests, triton.cdiv(channels, CHANNELS))](
        x, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, token_stride(x), channels,
        W=slots.shape[2], CHANNELS=CHANNELS, DECODE_ONLY=batch.decode_only, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def token_stride(x: Tensor) -> int:
    """Return the stride of tokens. A single token's may be anything; 0 is a multiple of all, so that nothing
    else is compiled for it.
    """
    return x.stride(0) if len(x) > 1 else 0
