"""Chooses the kernel for prefill attention over paged keys and values: there are two.

`prefill.py`, in Triton, handles every step on every GPU; `hopper_prefill.py` is faster in large steps on
Hopper. The two kernels' bits differ, so batch-invariant serving uses `prefill.py` for every step.

A large step reads each eight-bit page many times, so each page is first widened to 16 bits, once
(`widen_pages.py`). The Hopper kernel needs widened values, but reads stored e4m3 keys directly, with queries
rounded to e4m3 (`e4m3_queries.py`). If the Hopper kernel does not compile with the installed Triton, the
Triton kernel handles every step and a warning says so.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...base.log import logger
from ..device import compute_capability
from ..triton_imports import triton
from .hopper_prefill import hopper_prefill
from .options import AttentionOptions
from .prefill import LARGE, prefill_attention
from .widen_pages import widen_pages

HEAD_DIMS = (128, 256)
"""Head dimensions for the Hopper kernel. With 64, short prompts are slower on it."""
SMALLEST_PAGE = 16
MOST_GROUPED = 128
"""The most query heads per KV head, which are the rows of one token."""


@dataclass(frozen=True)
class Step:
    """What the choice of the kernel depends on.

    tokens      in the step, padding and decoding requests counted
    group       query heads of a kv head
    head_dim    of queries, keys and values as they are stored
    page        tokens in a page
    dtypes      of queries, keys and values
    scale_dims  0 without scales of keys and values, 1 for one a head, 3 for one a token and head
    one_form    bits may not depend on `tokens`
    """

    tokens: int
    group: int
    head_dim: int
    page: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    scale_dims: int
    one_form: bool


def hopper_takes(step: Step, capability: tuple[int, int]) -> bool:
    """Whether the Hopper kernel should compute the step on a GPU of that compute capability."""
    queries, keys, values = step.dtypes
    return (
        capability[0] == 9
        and not step.one_form
        and step.tokens > LARGE
        and step.head_dim in HEAD_DIMS
        and step.group <= MOST_GROUPED
        and step.page >= SMALLEST_PAGE
        and queries.itemsize == 2
        and values in (queries, torch.float16)
        and keys in (values, torch.float8_e4m3fn)
        and step.scale_dims <= 1
    )


@cache
def hopper_runs(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], head_dim: int
) -> bool:
    """Run the Hopper kernel on one token to see whether it compiles; if it does not, warn with the
    reason.
    """
    queries, keys, values = dtypes
    q = torch.zeros(1, 1, head_dim, dtype=queries, device=device)
    key_pages, value_pages = (
        torch.zeros(1, 1, 64, head_dim, dtype=dtype, device=device) for dtype in (keys, values)
    )
    block_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    tiles = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32, device=device)
    pages, options = (key_pages, value_pages, block_table), AttentionOptions(scale=1.0)
    try:
        hopper_prefill(q, *pages, tiles, options, torch.empty_like(q))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
        logger.warning(
            f"prompts are read by the slower of two kernels: that for Hopper does not run with Triton "
            f"{getattr(triton, '__version__', None)}: {reason}"
        )
        return False
    return True


def attend_prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    out: Tensor,
    one_form: bool,
    widened: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the tiles' tokens of `out`; arguments are as in `prefill_attention`.

    widened: for pages of eight bits, the pages that the step reads, int64 [n], and a block table of indices
             into this list
    """
    step = Step(
        tokens=len(q),
        group=q.shape[1] // key_pages.shape[1],
        head_dim=q.shape[2],
        page=key_pages.shape[2],
        dtypes=(q.dtype, key_pages.dtype, value_pages.dtype),
        scale_dims=0 if options.key_scale is None else options.key_scale.ndim,
        one_form=one_form,
    )
    capability = compute_capability(q.device)

    def for_hopper(step: Step) -> bool:
        return hopper_takes(step, capability) and hopper_runs(q.device, step.dtypes, step.head_dim)

    key_table = block_table
    if widened is not None:
        pages, block_table = widened
        value_pages = widen_pages(value_pages, pages)
        step = replace(step, dtypes=(q.dtype, key_pages.dtype, value_pages.dtype))
        if not for_hopper(step):
            key_table, key_pages = block_table, widen_pages(key_pages, pages)
            step = replace(step, dtypes=(q.dtype, key_pages.dtype, value_pages.dtype))
        key_scale, value_scale = options.key_scale, options.value_scale
        if key_scale is not None and value_scale is not None and step.scale_dims == 3:
            key_scale, value_scale = (scale.index_select(0, pages) for scale in (key_scale, value_scale))
            options = replace(options, key_scale=key_scale, value_scale=value_scale)
    if for_hopper(step):
        hopper_prefill(q, key_pages, value_pages, block_table, tiles, options, out, key_table)
    else:
        prefill_attention(q, key_pages, value_pages, block_table, tiles, options, out, one_form)
