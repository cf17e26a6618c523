"""The third line of ds4-nvfp4-spark issue 6 on a GPU: IQ2_XXS above NVFP4 at M = 1, below it once batched.

The issue says from M = 4 on. That held of an earlier kernel for IQ2_XXS; with the present one the two are
level at M = 8 on an H200 (`bench/results/iq2_xxs_log.md`) and at M = 16 on an H100, whose memory is slower.
So which is faster at an M is a fact of a card: it is asked on cards on which it was measured, and no other.
Of the products of one layer of Qwen3-8B, which the two formats differ in; whole servers are `bench/rival.py`.
"""

import copy
import functools

import pytest
import torch
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.iq2_xxs import IQ2_XXS
from scalegate.layouts.packing.layout import Problem
from scalegate.layouts.packing.nvfp4_swap_ab import NVFP4_SWAP_AB

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LAYER = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
ROTATED_BYTES = 150e6
"""Of copies of each weight, in turn: more than the L2 cache holds."""
AHEAD_FROM = {"H200": 16, "H100": 32}
"""By card, the M from which on NVFP4 is the faster one, as measured in November 2026."""
LEVEL = 0.1
"""Share of the time by which the two may differ where they are level: twice the most that two runs on an H100
showed at M = 16 (NVFP4 53.4 and IQ2_XXS 50.8 us; 69.8 and 68.2 us)."""
LEVEL_AT = {"H100": 16}
CONTESTANTS = {NVFP4(): NVFP4_SWAP_AB, IQ2XXS(): IQ2_XXS}


@pytest.fixture(scope="module")
def products():
    """By shape and format, copies of a packed weight."""
    cuda = torch.device("cuda")
    found = {}
    for n, k in LAYER:
        for spec, layout in CONTESTANTS.items():
            refusal = layout.refuses(Problem(spec, n, k, torch.bfloat16, cuda))
            if refusal is not None:
                pytest.skip(refusal)
            packed = layout.pack(spec.random(n, k, cuda), torch.bfloat16)
            found[n, k, spec.name] = [
                copy.deepcopy(packed) for _ in range(int(ROTATED_BYTES // packed.nbytes))
            ]
    return found


def multiplied(layout, x: torch.Tensor, packed: list, i: int) -> torch.Tensor:
    return layout.matmul(x, packed[i % len(packed)])


@pytest.mark.parametrize("m", [1, 16, 32, 64, 128])
def test_nvfp4_is_above_iq2_xxs_where_requests_are_batched(products, m: int):
    name = torch.cuda.get_device_name()
    card = next((card for card in AHEAD_FROM if card in name), None)
    if card is None:
        pytest.skip(f"which is faster was measured on {' and '.join(AHEAD_FROM)}, not on {name}")
    total = dict.fromkeys((spec.name for spec in CONTESTANTS), 0.0)
    for n, k in LAYER:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        calls = {
            spec.name: functools.partial(multiplied, layout, x, products[n, k, spec.name])
            for spec, layout in CONTESTANTS.items()
        }
        copies = max(len(products[n, k, spec_name]) for spec_name in calls)
        budget = TimingBudget(samples=16, seconds=0.3)
        for spec_name, microseconds in interleaved_microseconds(calls, copies, x.device, budget).items():
            total[spec_name] += microseconds
    ratio = total["nvfp4"] / total["iq2-xxs"]
    if m == LEVEL_AT.get(card):
        assert abs(ratio - 1) < LEVEL, total
    else:
        assert (ratio < 1) == (m >= AHEAD_FROM[card]), total
