"""Rounding to E4M3 as torch rounds, on every GPU that converts to it."""

from .triton_imports import tl, triton

CONVERTS_TWICE = (8, 9)
"""The compute capability for which Triton converts fp32 to fp16, rounded towards zero, and that to E4M3."""
LOST = tl.constexpr(0x1FFF)
"""The bits of fp32 that fp16 does not have."""


@triton.jit
def rounded_to_odd(values):
    """Return fp32 values with no more bits than fp16 has, the last of them set if any was lost.

    Rounding them once more, to E4M3, gives what rounding `values` to E4M3 gives. Rounding towards zero first
    would not: what lies just beyond the middle of two codes would lie in the middle.
    """
    bits = values.to(tl.int32, bitcast=True)
    return ((bits & ~LOST) | tl.where((bits & LOST) != 0, LOST + 1, 0)).to(tl.float32, bitcast=True)
