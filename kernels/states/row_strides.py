"""Inputs [T, H] and [T, H, D] as kernels take them that must not compile again in a later step.

Triton compiles a kernel anew for strides that are 1 or multiples of 16. So a stride must not follow the
number of tokens. Of a stride that is no multiple of 16 elements it does not know that rows are aligned, and
on Hopper Triton 3.6 may give wrong products in loops over such rows: 8 columns of bf16 gave errors of 59%.
"""

import torch
from torch import Tensor

ALIGNMENT = 16
"""Of a row's first byte, and in elements of the strides between rows."""


def with_steady_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last dimension is not contiguous, or if a stride might
    follow the number of tokens, or if rows [T, H] of D elements are not aligned.
    """
    strides = tensor.stride()
    steady = strides[-1] == 1
    if tensor.ndim == 3:
        steady &= len(tensor) == 1 or strides[0] >= strides[1]
        steady &= all(each % ALIGNMENT == 0 for each in (tensor.data_ptr(), *token_and_head(tensor)))
    return tensor if steady else tensor.clone(memory_format=torch.contiguous_format)


def token_and_head(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of the first two dimensions. Of one token torch may say any stride: at least the
    size of a token is returned.
    """
    token = tensor.stride(0) if len(tensor) > 1 else max(tensor.stride(0), tensor[0].numel())
    return token, tensor.stride(1) if tensor.shape[1] > 1 else 0
