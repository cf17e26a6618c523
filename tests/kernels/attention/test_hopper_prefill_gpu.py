"""Prefill attention by wgmma and TMA against the fp64 reference, on a Hopper GPU."""

import pytest
import torch
from scalegate.kernels.attention.choose_prefill import attend_prefill
from scalegate.kernels.attention.hopper_prefill import hopper_prefill
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import prefill_attention, prefill_attention_reference, tiles_of
from scalegate.tests.kernels.attention.rounded_queries import rounded_queries

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
        pages = [torch.randn(shape, generator=generator, device="cuda") for _ in range(2)]
        for (count, position, row), own in zip(chunks, order.split(counts), strict=True):
            self.table[row, : len(own)] = own
            for stored in pages:
                stored[own[-1].long(), :, (position + count - 1) % page + 1 :] = float("nan")
        self.pages = [stored.to(dtype) for stored in pages]
        tokens = sum(count for count, _, _ in chunks)
        self.q = torch.randn(tokens, heads, dim, generator=generator, device="cuda").bfloat16()
        self.tiles = torch.from_numpy(tiles_of(0, chunks, 0)).cuda()
        self.scale = dim**-0.5

    def attended(self, tiles=None, **options):
        out = torch.full_like(self.q, 7.0)
        tiles = self.tiles if tiles is None else tiles
        hopper_prefill(self.q, *self.pages, self.table, tiles, AttentionOptions(self.scale, **options), out)
        return out

    def error(self, **options) -> float:
        want = prefill_attention_reference(
            self.q, *self.pages, self.table, self.tiles, AttentionOptions(self.scale, **options)
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
        "window": {"sliding_window": 40},
        "wide window": {"sliding_window": 300},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": sinks},
        "all": {"sliding_window": 100, "softcap": 5.0, "sinks": sinks},
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


class E4M3Case(Case):
    """Keys as e4m3, values as fp16 with page numbers of their own; the reference sees rounded queries."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        keys, values = (stored.to(torch.float8_e4m3fn) for stored in self.pages)
        self.pages = [keys, values.half()]
        order = torch.randperm(len(keys), device="cuda")
        self.moved = self.pages[1][order].contiguous()
        self.moved_table = order.argsort().int()[self.table.long()]

    def attended(self, tiles=None, **options):
        out = torch.full_like(self.q, 7.0)
        pages = self.pages[0], self.moved, self.moved_table
        tiles = self.tiles if tiles is None else tiles
        hopper_prefill(self.q, *pages, tiles, AttentionOptions(self.scale, **options), out, self.table)
        return out

    def error(self, rounded=True, **options) -> float:
        q = rounded_queries(self.q.float()) if rounded else self.q
        want = prefill_attention_reference(
            q, *self.pages, self.table, self.tiles, AttentionOptions(self.scale, **options)
        )
        return float((self.attended(**options).double() - want).norm() / want.norm())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (8, 2), (6, 2), (16, 1)])
def test_e4m3_keys_of_any_head_size_and_grouping(dim: int, heads: int, kv_heads: int):
    assert E4M3Case(heads, kv_heads, dim).error() < 4e-3


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("page", [16, 32, 128, 256])
def test_e4m3_keys_in_any_page_size(page: int, dim: int):
    assert E4M3Case(page=page, dim=dim).error() < 4e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_e4m3_keys_with_a_scale_a_head_window_softcap_and_sinks(dim: int):
    scales = {name: torch.rand(2, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    case = E4M3Case(dim=dim)
    assert case.error(**scales) < 4e-3
    assert case.error(**scales, softcap=3.0) < 4e-3
    sinks = torch.linspace(-2, 5, 8, device="cuda")
    assert case.error(**scales, sliding_window=100, softcap=5.0, sinks=sinks) < 4e-3


def test_the_error_would_show_queries_that_are_not_rounded_or_have_one_scale():
    """A control: rounding queries is visible, and so would be the scale of another head or token."""
    case = E4M3Case()
    assert case.error(rounded=False) > 8e-3
    case.q *= torch.logspace(-3, 0.5, case.q[..., 0].numel(), device="cuda").view(*case.q.shape[:2], 1)
    assert case.error() < 4e-3


def test_queries_of_zeros_weigh_all_keys_alike():
    case = E4M3Case()
    case.q[100:120] = 0.0
    assert case.error() < 4e-3


def test_a_token_gets_the_same_bits_over_e4m3_keys_wherever_its_tile_begins():
    case = E4M3Case()
    together = case.attended()
    assert torch.equal(together, case.attended())
    first = 0
    for count, position, row in CHUNKS:
        pieces = [(min(13, count - start), position + start, row) for start in range(0, count, 13)]
        out = case.attended(torch.from_numpy(tiles_of(first, pieces, 0)).cuda())
        assert torch.equal(out[first : first + count], together[first : first + count])
        first += count


def test_a_large_step_over_stored_e4m3_takes_keys_as_they_lie_unless_bits_are_kept():
    case = E4M3Case(chunks=((1000, 0, 0), (300, 200, 1)))
    stored = case.pages[0], case.pages[1].to(torch.float8_e4m3fn)
    scales = {name: torch.rand(2, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    pages = torch.arange(len(stored[0]), device="cuda").flip(0)
    widened = pages, pages.argsort().int()[case.table.long()]
    outs, options = {}, AttentionOptions(case.scale, **scales)
    for one_form in (False, True):
        outs[one_form] = torch.empty_like(case.q)
        attend_prefill(case.q, *stored, case.table, case.tiles, options, outs[one_form], one_form, widened)
    assert torch.equal(outs[False], case.attended(**scales))
    want = torch.empty_like(case.q)
    wide = [pages.half() for pages in stored]
    prefill_attention(case.q, *wide, case.table, case.tiles, options, want, one_form=True)
    assert torch.equal(outs[True], want)
