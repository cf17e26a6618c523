"""Rotates the results of prefill attention over rotated pages back; Triton.

Decoding requests are left out: the merge of their splits rotates their results back (`../decode.py`).
"""

from torch import Tensor

from ...hadamard import log2, rotate, rotate_rows, rotates_by_products
from ...triton_imports import tl, triton
from .steps import is_decoding


@triton.jit(do_not_specialize=["num_requests"])
def _rotate_back(
    rotated_ptr, out_ptr, lengths_ptr, num_requests,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr,
):  # fmt: skip
    """Rotate back ROWS heads of one token's result, unless the token belongs to a decoding request."""
    token = tl.program_id(0).to(tl.int64)
    if is_decoding(token, lengths_ptr, num_requests):
        return
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = (token * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    keep = (head < HEADS)[:, None] & (at >= 0)
    x = tl.load(rotated_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, rotate(x, ROWS, DIM, LOG_DIM).to(out_ptr.dtype.element_ty), mask=keep)


def rotate_back(rotated: Tensor, lengths: Tensor, out: Tensor, num_decodes: int | None = None) -> None:
    """Rotate the prompts' tokens of `rotated`, [T, H, D], back into `out`, of any float dtype.

    num_decodes: number of decoding tokens, which come first; None if the host does not know it
    """
    if num_decodes is not None and rotates_by_products(rotated):
        rotate_rows(rotated[num_decodes:], out[num_decodes:])
        return
    count, heads, dim = rotated.shape
    rows = min(triton.next_power_of_2(heads), 8)
    _rotate_back[(count, triton.cdiv(heads, rows))](
        rotated, out, lengths, len(lengths),
        HEADS=heads, ROWS=rows, DIM=dim, LOG_DIM=log2(dim), num_warps=4,
    )  # fmt: skip
