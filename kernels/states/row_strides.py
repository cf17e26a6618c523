"""Inputs [T, H] and [T, H, D] as kernels take them that must not compile again in a later step.

Triton compiles a kernel anew for strides that are 1 or multiples of 16. So a stride must not follow the
number of tokens.
"""

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that are copied at a time. On Hopper, Triton 3.6 may give wrong products in loops over rows that
begin elsewhere."""


def with_steady_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last dimension is not contiguous, or if a stride might
    follow the number of tokens, or if rows [T, H] of D elements are not aligned.
    """
    strides = tensor.stride()
    steady = strides[-1] == 1
    if tensor.ndim == 3:
        steady &= len(tensor) == 1 or strides[0] >= strides[1]
        rows = [stride * tensor.itemsize for stride in token_and_head(tensor)]
        steady &= all(begin % ALIGNMENT == 0 for begin in (tensor.data_ptr(), *rows))
    return tensor if steady else tensor.clone(memory_format=torch.contiguous_format)


def token_and_head(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of the first two dimensions. Of one token torch may say any stride: at least the
    size of a token is returned.
    """
    token = tensor.stride(0) if len(tensor) > 1 else max(tensor.stride(0), tensor[0].numel())
    return token, tensor.stride(1) if tensor.shape[1] > 1 else 0
