"""Where the portable layouts serve batch invariance; their product is in `tests/kernels/interpreted/`."""

import pytest
import torch
from scalegate.kernels.device import compute_capability
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.packing.layout import Problem
from scalegate.layouts.packing.portable import INT4_PORTABLE


@pytest.mark.parametrize(
    ("capability", "serves"),
    [((8, 0), True), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)],
)
def test_batch_invariance_is_refused_where_tiles_take_two_instructions(
    capability: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    compute_capability.cache_clear()
    tuned = Problem(Int4(128), 256, 512, torch.bfloat16, torch.device("cuda", 0))
    pinned = Problem(Int4(128), 256, 512, torch.bfloat16, torch.device("cuda", 0), batch_invariance="pin")
    try:
        assert INT4_PORTABLE.refuses(tuned) is None
        assert (INT4_PORTABLE.refuses(pinned) is None) == serves
    finally:
        compute_capability.cache_clear()
