"""Queries rounded to e4m3 with a scale for each token and head, so that they multiply e4m3 keys as these lie.

    q            [T, H, D]
    codes        float8_e4m3fn [T, H, D]   q * (448 / the largest magnitude of its head)
    scale        fp32 [T, H]               that magnitude / 448; it belongs to the scores

Not for keys and values, whose scale is one of a head that never changes.
"""

import torch
from torch import Tensor

LARGEST = 448.0
"""Of e4m3."""


def e4m3_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale; a head of zeros has zeros."""
    largest = q.float().abs().amax(-1)
    inverse = torch.where(largest > 0, LARGEST / largest, 0.0)
    codes = (q.float() * inverse.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), largest / LARGEST


def rounded_queries(q: Tensor) -> Tensor:
    """What the codes stand for, in q's dtype."""
    codes, scale = e4m3_queries(q)
    return (codes.float() * scale.unsqueeze(-1)).to(q.dtype)
