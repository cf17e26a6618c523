"""Freed blocks between live ones go back to the system when asked for, and not before."""

import platform

import psutil
import pytest
import torch
from scalegate.pipeline.machine.malloc_trim import return_freed_memory

BLOCK, COUNT = 1 << 14, 1 << 10
"""fp32 numbers to a block, 64 KiB: never mapped on its own; and how many blocks."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give freed memory back")
def test_what_was_freed_between_live_blocks_is_given_back():
    process = psutil.Process()
    blocks = [torch.ones(BLOCK) for _ in range(COUNT)]
    full = process.memory_info().rss
    live = blocks[::2]
    del blocks
    freed = COUNT // 2 * BLOCK * 4
    assert full - process.memory_info().rss < 0.1 * freed, "the C library gives it back by itself"
    return_freed_memory()
    assert full - process.memory_info().rss > 0.7 * freed
    assert all(bool((block == 1).all()) for block in live)
