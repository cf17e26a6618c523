"""How a step's tokens are laid out, for the kernels of coded keys and values; Triton."""

from ...triton_imports import tl, triton


@triton.jit
def is_decoding(token, lengths_ptr, num_requests):
    """Whether the step's `token` is a decoding request's, not a prompt's."""
    return tl.load(lengths_ptr + token, mask=token < num_requests, other=0) > 0
