"""A linear recurrence in each channel over slots: single tokens, and prompts token by token; Triton.

    x            [T, C]           bf16, fp16 or fp32
    log_decay    [T, C]           at most 0
    slots        fp32 [rows, C]   changed in place
    output       [T, C]           contiguous; written

    S ← exp(log_decay) S + x      output = S

The reference is `layouts/states/linear_recurrence.py`. Channels are contiguous; strides of tokens are any. A
program has some channels of a request and computes GROUP tokens after one another, whose inputs it has loaded
at once: their latency is paid for once, and single tokens take their bytes' time.
"""

from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .batch import StateBatch
from .kept_inputs import token_stride
from .requests import tokens_of

CHANNELS = 64
"""Of a program, whose single warp has two in each lane."""
GROUP = 16


@triton.jit
def _recur(
    x, log_decay, slots, query_start_loc, seq_lens, request_rows, output, x_stride, decay_stride, C,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, DECODE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a request; grid (requests, blocks of channels)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    first, count, has_past = tokens_of(request, query_start_loc, seq_lens, DECODE_ONLY)
    first = first.to(tl.int64)
    end = first + count
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    keep = channel < C
    x += channel
    log_decay += channel
    output += channel
    if count == 0:
        if DECODE_ONLY:
            tl.store(output + first * C, tl.zeros([CHANNELS], output.dtype.element_ty), mask=keep)
        return
    at = slots + tl.load(request_rows + request) * C + channel
    state = tl.load(at, mask=keep & has_past, other=0.0)
    for start in range(0, count, GROUP):
        added, decay = (), ()
        for i in tl.static_range(GROUP):
            token = first + start + i
            loaded = keep & (token < end)
            new = tl.load(x + token * x_stride, mask=loaded, other=0.0)
            added = added + (new,)  # type: ignore[assignment] # noqa: RUF005
            # A decay of 1 and nothing added: tokens after the last one leave the state alone.
            factor = tl.load(log_decay + token * decay_stride, mask=loaded, other=0.0)
            decay = decay + (factor,)  # type: ignore[assignment] # noqa: RUF005
        for i in tl.static_range(GROUP):
            state = state * tl.exp(decay[i].to(tl.float32)) + added[i].to(tl.float32)
            token = first + start + i
            tl.store(output + token * C, state.to(output.dtype.element_ty), mask=keep & (token < end))
    tl.store(at, state, mask=keep)


def linear_recurrence(x: Tensor, log_decay: Tensor, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
    """Compute a step's tokens and change the slots of its requests; arguments are as in the file's docstring.

    Nothing is written for padding, but zeros in a step of single tokens.
    """
    x, log_decay = (each if each.stride(1) == 1 else each.contiguous() for each in (x, log_decay))
    channels = x.shape[1]
    pdl = compute_capability(x.device) >= (9, 0)
    _recur[(len(batch.seq_lens), triton.cdiv(channels, CHANNELS))](
        x, log_decay, slots, batch.query_start_loc, batch.seq_lens, batch.request_rows, output,
        token_stride(x), token_stride(log_decay), channels,
        CHANNELS=CHANNELS, GROUP=1 if batch.decode_only else GROUP, DECODE_ONLY=batch.decode_only, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
