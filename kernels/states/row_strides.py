"""Strides of inputs [T, H] and [T, H, D] as kernels take them that must not compile again in a later step.

Triton compiles a kernel anew for strides that are 1 or multiples of 16, since it copies 16 bytes at a time if
rows begin at multiples of 16 bytes. So a stride must not follow the number of tokens.
"""

from torch import Tensor


def with_steady_strides(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last dimension is not contiguous, or if a stride might
    follow the number of tokens.
    """
    strides = tensor.stride()
    by_token = tensor.ndim == 2 or len(tensor) == 1 or strides[0] >= strides[1]
    return tensor if strides[-1] == 1 and by_token else tensor.contiguous()


def token_and_head(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of the first two dimensions. Of one token torch may say any stride: at least the
    size of a token is returned.
    """
    token = tensor.stride(0) if len(tensor) > 1 else max(tensor.stride(0), tensor[0].numel())
    return token, tensor.stride(1) if tensor.shape[1] > 1 else 0
