"""Rounds activations to E4M3 or INT8, with scales of their own or a given one; Triton.

    x       [M, K]    bf16 or fp16, rows contiguous
    codes   [M, K]    float8_e4m3fn or int8
    scales  [G, M]    fp32: the largest magnitude of a row, or of 128 columns of it, divided by the largest
                      code, which is 448 or 127; or the given scale in every row

`layouts/formats/e4m3.py` and `layouts/formats/int8.py` define the rounding.

The results are bit for bit those of the definition on a CPU, because both quotients are rounded as IEEE 754
requires. A call takes 3 M K bytes, all but M K of them in L2 if x was just written.
"""

import torch
from torch import Tensor

from ..device import compute_capability
from ..e4m3 import CONVERTS_TWICE, rounded_to_odd
from ..triton_imports import tl, triton

E4M3_MAX, INT8_MAX = tl.constexpr(448.0), tl.constexpr(127.0)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)
"""fp32 numbers of this size are whole: adding it rounds a smaller number to the nearest, ties to even."""
TINY, LIFT = tl.constexpr(2.0**-64), tl.constexpr(2.0**64)
"""Scales below TINY are multiplied by LIFT, and so are the numbers that they divide."""
PIECE, MOST_PIECES = 4096, 16
"""A CTA holds a row in pieces of so many columns, or in so many larger pieces."""
FEW_ROWS = 256
"""Rows up to which CTAs have twice the warps, since a GPU has more multiprocessors than CTAs."""
GROUP = 128
GROUPS_AT_ONCE = 32


@triton.jit
def codes_of(values, scale, TWICE: tl.constexpr, INTEGERS: tl.constexpr):
    """Return codes of `values`, divided by fp32 scales of the same or a broadcast shape.

    The quotient is the one of IEEE 754, for less than a division: a fused operation tells exactly by how
    much multiplying by the reciprocal errs, and another corrects it (Markstein). Tiny scales are lifted, so
    that the error is no subnormal number.
    """
    divisor = tl.where(scale > 0, scale, 1.0)
    lift = tl.where(divisor < TINY, LIFT, 1.0)
    divisor *= lift
    inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
    lifted = values * lift
    about = lifted * inverse
    # What is too much, times a negative number: a negative zero keeps its sign, though Triton's -x is 0 - x.
    beyond = tl.fma(about, divisor + tl.zeros_like(about), -lifted)
    wide = tl.fma(beyond, tl.zeros_like(about) - inverse, about)
    # The scale of tiny numbers is rounded itself, so that codes could pass the largest one.
    if INTEGERS:
        whole = (wide + TO_WHOLE) - TO_WHOLE
        return tl.minimum(tl.maximum(whole, -INT8_MAX), INT8_MAX).to(tl.int8)
    else:
        wide = tl.minimum(tl.maximum(wide, -E4M3_MAX), E4M3_MAX)
        if TWICE:
            wide = rounded_to_odd(wide)
        return wide.to(tl.float8e4nv)


@triton.jit
def scale_of(largest, INTEGERS: tl.constexpr):
    LARGEST: tl.constexpr = INT8_MAX if INTEGERS else E4M3_MAX
    return tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)


@triton.jit
def round_rows_kernel(
    x, codes, scales, given, K,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, GIVEN: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round rows; a row has a CTA, in whose registers it stays, and a scale of its own or the GIVEN one."""
    if PDL:
        # The product behind may begin, and load its weights until this kernel has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    INTEGERS: tl.constexpr = codes.dtype.element_ty == tl.int8
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pieces = ()
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        inside = i * BLOCK + column < K
        values = tl.load(x + row * K + i * BLOCK + column, mask=inside, other=0.0)
        pieces = pieces + (values,)  # type: ignore[assignment]  # noqa: RUF005
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = tl.load(given) if GIVEN else scale_of(tl.max(largest, axis=0), INTEGERS)
    tl.store(scales + row, scale)
    for i in tl.static_range(PIECES):
        rounded = codes_of(pieces[i].to(tl.float32), scale, TWICE, INTEGERS)
        tl.store(codes + row * K + i * BLOCK + column, rounded, mask=i * BLOCK + column < K)


@triton.jit
def round_groups_kernel(
    x, codes, scales, M, groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round groups of 128 columns to E4M3, some consecutive ones a CTA; a row of x has `groups` groups."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (group < M * groups)[:, None]
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(values), axis=1), False)
    tl.store(scales + group % groups * M + group // groups, scale, mask=group < M * groups)
    tl.store(codes + at, codes_of(values, scale[:, None], TWICE, False), mask=inside)


def round_rows(
    x: Tensor,
    in_groups: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x; the file's docstring describes the tensors.

    in_groups: every 128 columns of a row have a scale of their own; else the row has one
    scale: fp32 [1], the scale of all rows; None if each has its own
    dtype: of codes; groups are rounded to E4M3
    """
    m, k = x.shape
    groups = k // GROUP if in_groups else 1
    codes = torch.empty(m, k, dtype=dtype, device=x.device)
    scales = torch.empty(groups, m, dtype=torch.float32, device=x.device)
    if m == 0:
        return codes, scales
    capability = compute_capability(x.device)
    twice, pdl = capability == CONVERTS_TWICE, capability >= (9, 0)
    if in_groups:
        ctas = triton.cdiv(m * groups, GROUPS_AT_ONCE)
        round_groups_kernel[(ctas,)](
            x, codes, scales, m, groups, GROUPS_AT_ONCE, GROUP, twice, pdl, num_warps=8, launch_pdl=pdl
        )
    else:
        largest = max(PIECE, triton.next_power_of_2(triton.cdiv(k, MOST_PIECES)))
        block = min(largest, triton.next_power_of_2(k))
        warps = min(16, max(1, block // (256 if m <= FEW_ROWS else 512)))
        pieces = triton.cdiv(k, block)
        round_rows_kernel[(m,)](
            x, codes, scales, x if scale is None else scale, k, block, pieces, scale is not None, twice, pdl,
            num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return codes, scales
