"""Queries as attention over FP8 keys on Hopper sees them: rounded to E4M3."""

from scalegate.kernels.attention.e4m3_queries import e4m3_queries
from torch import Tensor


def rounded_queries(q: Tensor) -> Tensor:
    """The values of the codes, in q's dtype."""
    codes, scale = e4m3_queries(q)
    return (codes.float() * scale.unsqueeze(-1)).to(q.dtype)
