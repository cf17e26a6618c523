"""Prefill attention by wgmma and TMA against the fp64 reference, on a Hopper GPU."""

import pytest
import torch
from scalegate.kernels.hopper.prefill import hopper_prefill
from scalegate.kernels.prefill_attention import prefill_attention_reference, tiles_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

CHUNKS = ((1, 0, 0), (200, 0, 1), (70, 90, 2), (31, 513, 3), (129, 1000, 4))
"""Tokens, position of the first, row."""


class Case:
    """Random queries and pages for CHUNKS; behind each context lies what is no number."""

    def __init__(self, heads=8, kv_heads=2, dim=128, page=64, dtype=torch.bfloat16, chunks=CHUNKS):
        generator = torch.Generator("cuda").manual_seed(heads * dim + page)
        counts = [-(-(position + count) // page) for count, position, _ in chunks]
        order = torch.randperm(sum(counts), generator=generator, device="cuda").int()
        self.table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device="cuda")
        shape = (sum(counts), kv_heads, page, dim)
        self.pages = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2)]
        for (count, position, row), pages in zip(chunks, order.split(counts), strict=True):
            self.table[row, : len(pages)] = pages
            for stored in self.pages:
                stored[pages[-1].long(), :, (position + count - 1) % page + 1 :] = float("nan")
        tokens = sum(count for count, _, _ in chunks)
        self.q = torch.randn(tokens, heads, dim, generator=generator, device="cuda").bfloat16()
        self.tiles = torch.from_numpy(tiles_of(0, chunks, 0)).cuda()
        self.settings = {"scale": dim**-0.5}

    def attended(self, tiles=None, **options):
        out = torch.full_like(self.q, 7.0)
        tiles = self.tiles if tiles is None else tiles
        hopper_prefill(self.q, *self.pages, self.table, tiles, out=out, **self.settings, **options)
        return out

    def error(self, **options) -> float:
        want = prefill_attention_reference(
            self.q, *self.pages, self.table, self.tiles, **self.settings, **options
        )
        return float((self.attended(**options).double() - want).norm() / want.norm())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (8, 2), (6, 2), (16, 1)])
def test_any_head_size_and_grouping(dim: int, heads: int, kv_heads: int):
    assert Case(heads, kv_heads, dim).error() < 4e-3


@pytest.mark.parametrize("page", [16, 32, 128, 256])
def test_any_page_size(page: int):
    assert Case(page=page).error() < 4e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("option", ["window", "wide window", "softcap", "sinks", "all"])
def test_window_softcap_and_sinks(dim: int, option: str):
    sinks = torch.linspace(-2, 5, 8, device="cuda")
    options = {
        "window": {"window": 40},
        "wide window": {"window": 300},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": sinks},
        "all": {"window": 100, "softcap": 5.0, "sinks": sinks},
    }[option]
    case = Case(dim=dim)
    assert case.error(**options) < 4e-3
    changed = case.attended(**options).float() - case.attended().float()
    assert changed.norm() > 0.03 * case.attended().float().norm()


def test_fp16_pages_with_a_scale_for_each_head():
    scales = {name: torch.rand(2, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    assert Case(dtype=torch.float16).error(**scales) < 4e-3


def test_padding_gets_zeros_and_other_tokens_are_left_alone():
    case = Case()
    tiles = case.tiles[case.tiles[:, 2] != 513].clone()
    tiles[tiles[:, 2] == 90, 2] = -1
    out = case.attended(torch.cat([tiles, torch.zeros_like(tiles[:2])]))
    assert not out[201:271].any() and bool((out[271:302] == 7).all()) and not bool((out[302:] == 7).any())


def test_a_token_gets_the_same_bits_wherever_its_tile_begins_and_whoever_is_there():
    case = Case()
    together = case.attended()
    assert torch.equal(together, case.attended())
    first = 0
    for count, position, row in CHUNKS:
        for cut in (1, 13, 64):
            pieces = [(min(cut, count - start), position + start, row) for start in range(0, count, cut)]
            out = case.attended(torch.from_numpy(tiles_of(first, pieces, 0)).cuda())
            assert torch.equal(out[first : first + count], together[first : first + count])
        first += count
