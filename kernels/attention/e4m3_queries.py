"""Queries rounded to e4m3, with one scale a token and head, to multiply stored e4m3 keys directly.

    q            [T, H, D]
    codes        float8_e4m3fn [T, H, D]   q * (448 / the largest magnitude of its head, or 1e-20)
    scale        fp32 [T, H]               that magnitude / 448, never zero; it belongs to the scores

Keys and values are left out: their scale per head is fixed.
"""

import torch
from torch import Tensor

LARGEST = 448.0
"""Of e4m3."""
LEAST = 1e-20
"""A head's largest magnitude counts as no less: zero times minus infinity, a hidden score, is no number, and
448 over less than 1.3e-36 is infinite. Queries so small weigh all keys alike, exactly or not."""


def e4m3_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scale; a head of zeros has codes of zero."""
    largest = q.float().abs().amax(-1).clamp(min=LEAST)
    codes = (q.float() * (LARGEST / largest).unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), largest / LARGEST
