"""Marks tests of numbers in E4M3, which a GPU before compute capability 8.9 refuses."""

import pytest
import torch
from scalegate.layouts.kv.cuda import E4M3_FROM

NEEDS_E4M3 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < E4M3_FROM,
    reason=f"needs compute capability {E4M3_FROM[0]}.{E4M3_FROM[1]}",
)


def marked(name: str, *others: object) -> object:
    """The parameters of a test, whose first is a KV format."""
    return pytest.param(name, *others, marks=[NEEDS_E4M3] if name in ("fp8", "nvfp4") else [])
