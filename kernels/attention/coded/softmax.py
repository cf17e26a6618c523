"""Attention over four slices of a head's channels, shared by the kernels of coded pages; Triton.

A word holds the codes of four channels, so queries, keys, values and results are cut into four slices of D/4
channels. `channel`, int32 [D/4], has the channels of the first slice; each further slice begins STEP later.
In every product the keys (or the values' channels) are rows and the queries are columns: matrix units take
sixteen rows and at least eight columns, and a group has few query heads. Scores are in log2.
"""

import torch
from torch import Tensor

from ...device import compute_capability
from ...triton_imports import tl, triton
from ..decode import PROGRAMS_WANTED


@triton.jit
def load_slices(ptr, at, mask, WIDTH: tl.constexpr):
    """Load four tensors [N, D/4] of rows of D that begin at `at`, int64 [N]; zeros if `mask`, [N], is false.

    Slices of neighbouring channels.
    """
    where = ptr + at[:, None] + tl.arange(0, WIDTH)[None, :]
    keep = mask[:, None]
    return (
        tl.load(where, mask=keep, other=0.0),
        tl.load(where + WIDTH, mask=keep, other=0.0),
        tl.load(where + 2 * WIDTH, mask=keep, other=0.0),
        tl.load(where + 3 * WIDTH, mask=keep, other=0.0),
    )


@triton.jit
def load_columns(ptr, at, mask, channel, STEP: tl.constexpr):
    """Load the same slices as `load_slices`, transposed: [D/4, N]."""
    where = ptr + at[None, :] + channel[:, None]
    keep = mask[None, :]
    return (
        tl.load(where, mask=keep, other=0.0),
        tl.load(where + STEP, mask=keep, other=0.0),
        tl.load(where + 2 * STEP, mask=keep, other=0.0),
        tl.load(where + 3 * STEP, mask=keep, other=0.0),
    )


@triton.jit
def store_columns(ptr, at, mask, x0, x1, x2, x3, channel, STEP: tl.constexpr):
    """The reverse."""
    where = ptr + at[None, :] + channel[:, None]
    keep = mask[None, :]
    tl.store(where, x0.to(ptr.dtype.element_ty), mask=keep)
    tl.store(where + STEP, x1.to(ptr.dtype.element_ty), mask=keep)
    tl.store(where + 2 * STEP, x2.to(ptr.dtype.element_ty), mask=keep)
    tl.store(where + 3 * STEP, x3.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def capped(scores, softcap, SOFTCAP: tl.constexpr):
    """Compute tanh(x) = 1 - 2 / (exp(2x) + 1); scores carry a factor log2(e), and so does softcap."""
    if SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
    return scores


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a b in the model's precision; PRECISION comes from `precision_of`."""
    if PRECISION == "ieee":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


def precision_of(x: Tensor) -> str:
    """Return the precision for products of x: interpreters and GPUs before sm_80 multiply bf16 as fp32."""
    if x.dtype == torch.float32:
        return "tf32x3"
    is_wide = x.dtype == torch.bfloat16 and compute_capability(x.device) < (8, 0)
    return "ieee" if is_wide else "tf32"


@triton.jit
def dot4(k0, k1, k2, k3, q0, q1, q2, q3):
    """Multiply keys [N, D/4] by queries [D/4, M], over all four slices; return products [N, M]."""
    scores = tl.dot(k0, q0)
    scores = tl.dot(k1, q1, scores)
    scores = tl.dot(k2, q2, scores)
    return tl.dot(k3, q3, scores)


@triton.jit
def attend_plain(
    q, acc, largest, total, keys, values, visible, scale_log2, softcap,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one block of uncoded keys and values. After this block, every query must have attended to at
    least one key.

    q, acc, keys, values: four slices, queries and results [D/4, M], keys and values [N, D/4]
    visible: [N, 1 or M]
    """
    q0, q1, q2, q3 = q
    acc0, acc1, acc2, acc3 = acc
    k0, k1, k2, k3 = keys
    v0, v1, v2, v3 = values
    scores = product(k0, q0, None, PRECISION)
    scores = product(k1, q1, scores, PRECISION)
    scores = product(k2, q2, scores, PRECISION)
    scores = product(k3, q3, scores, PRECISION)
    scores = capped(scores * scale_log2, softcap, SOFTCAP)
    scores = tl.where(visible, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=0))
    rescale = tl.exp2(largest - new_largest)
    probability = tl.exp2(scores - new_largest[None, :])
    total = total * rescale + tl.sum(probability, axis=0)
    probability = probability.to(v0.dtype)
    acc0 = product(v0.T, probability, acc0 * rescale[None, :], PRECISION)
    acc1 = product(v1.T, probability, acc1 * rescale[None, :], PRECISION)
    acc2 = product(v2.T, probability, acc2 * rescale[None, :], PRECISION)
    acc3 = product(v3.T, probability, acc3 * rescale[None, :], PRECISION)
    return acc0, acc1, acc2, acc3, new_largest, total


def programs_of_splits(max_splits: int, heads_of_contexts: int) -> int:
    """Return the number of programs that share the splits of one head of a context: a power of two, so that
    all programs get equally many splits.

    With six programs for 64 splits, for example, only a third of the programs had work in the last round.
    """
    wanted = max(1, 2 * PROGRAMS_WANTED // heads_of_contexts)
    return min(max_splits, 1 << wanted.bit_length() - 1)
