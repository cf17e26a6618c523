"""Strides of [T, H, D] tensors as kernels take them that must not compile again when a stride changes.

Triton reads and copies 16 bytes at a time only if it knows that rows begin at multiples of 16 bytes. Of a
stride that it does not specialize on it knows nothing. So a kernel gets strides in units, multiplies them by
the unit, which is a constant, and knows their divisor.
"""

import math

from torch import Tensor

MOST = 16


def token_and_head(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of a tensor's first two dimensions: 0 for a dimension of one element, whose stride
    torch leaves undefined.
    """
    token, head = (tensor.stride(axis) if tensor.shape[axis] > 1 else 0 for axis in (0, 1))
    return token, head


def stride_unit(*tensors: Tensor) -> int:
    """Return a common divisor of the tensors' first two strides: 16, or less if some stride is odd."""
    return math.gcd(MOST, *(stride for tensor in tensors for stride in token_and_head(tensor)))


def in_units(tensor: Tensor, unit: int) -> tuple[int, int]:
    token, head = token_and_head(tensor)
    return token // unit, head // unit
