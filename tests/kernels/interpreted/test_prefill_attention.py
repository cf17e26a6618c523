"""Prefill attention over pages against its fp64 reference; see conftest.py."""

import pytest
import torch
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import prefill_attention, prefill_attention_reference, tiles_of
from scalegate.tests.exhaustive import exhaustive_but

from .test_decode_attention import DEVICE, make_case

CHUNKS = ((1, 0, 0), (9, 8, 1), (70, 90, 2))
"""Tokens, position of the first, row: a whole prompt of one token, and the ends of two longer ones."""


def make_prefill(chunks=CHUNKS, padding=3, heads=4, kv_heads=2, head_dim=64, page=16, kv="float32"):
    """Pages whose contexts end with the chunks, and queries for the chunks' tokens and some padding."""
    case, scales = make_case(heads, kv_heads, head_dim, page, [p + n for n, p, _ in chunks], kv)
    generator = torch.Generator().manual_seed(1)
    tokens = sum(count for count, _, _ in chunks) + padding
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(DEVICE, case[0].dtype)
    tiles = torch.from_numpy(tiles_of(0, chunks, padding)).to(DEVICE)
    return [q, case[1], case[2], case[3], tiles], scales


def relative_error(case, **settings):
    options = AttentionOptions(case[0].shape[-1] ** -0.5, **settings)
    out = torch.full_like(case[0], float("nan"))
    prefill_attention(*case, options, out)
    want = prefill_attention_reference(*case, options)
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("head_dim", exhaustive_but([64, 96, 128, 256], 64, 256))
@pytest.mark.parametrize("heads,kv_heads", exhaustive_but([(2, 2), (8, 2), (16, 1), (6, 2)], (6, 2)))
def test_any_head_size_and_grouping(head_dim, heads, kv_heads):
    case, _ = make_prefill(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert relative_error(case) < 1e-5


def test_a_chunk_of_several_tiles():
    case, _ = make_prefill(((140, 20, 0),))
    assert len(case[4]) == 3 and relative_error(case) < 1e-5


@pytest.mark.parametrize("page", [1, 16, 32, 64])
def test_any_page_size(page):
    case, _ = make_prefill(page=page)
    assert relative_error(case) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 40},
        {"sliding_window": 100},
        {"softcap": 3.0},
        {"sinks": torch.linspace(-2, 5, 4, device=DEVICE)},
        {"sliding_window": 100, "softcap": 5.0, "sinks": torch.linspace(-2, 5, 4, device=DEVICE)},
    ],
    ids=["window", "window-over-blocks", "softcap", "sinks", "all"],
)
def test_window_softcap_and_sinks(options):
    case, _ = make_prefill()
    assert relative_error(case, **options) < 1e-5


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "sinks"])
def test_each_option_changes_the_result(option):
    values = {"sliding_window": 40, "softcap": 1.0, "sinks": torch.full((4,), 3.0, device=DEVICE)}
    case, _ = make_prefill()
    plain = prefill_attention_reference(*case, AttentionOptions(0.125))
    changed = prefill_attention_reference(*case, AttentionOptions(0.125, **{option: values[option]}))
    assert float((plain - changed).norm() / plain.norm()) > 0.03


@pytest.mark.parametrize("kv", ["float8_e4m3fn", "int8"])
def test_eight_bit_pages(kv):
    case, scales = make_prefill(kv=kv)
    assert relative_error(case, **scales) < 2e-3


def test_padding_gets_zeros_and_other_tokens_are_left_alone():
    case, _ = make_prefill(padding=5)
    case[4] = case[4][case[4][:, 2] != 8]
    out = torch.full_like(case[0], 7.0)
    prefill_attention(*case, AttentionOptions(0.125), out)
    assert torch.equal(out[-5:], torch.zeros_like(out[-5:]))
    assert bool((out[1:10] == 7).all()) and not bool((out[10:-5] == 7).any())


def test_a_tile_without_tokens_does_nothing():
    case, _ = make_prefill()
    case[4] = torch.cat([case[4], torch.zeros_like(case[4][:2])])
    assert relative_error(case) < 1e-5


def test_the_longest_contexts_come_first():
    tiles = tiles_of(5, [(130, 0, 4), (1, 500, 7)], padding=2)
    assert tiles.tolist() == [[135, 1, 500, 7], [133, 2, 128, 4], [5, 128, 0, 4], [136, 2, -1, 0]]


def test_tokens_on_their_own_get_the_bits_they_get_in_company():
    case, _ = make_prefill()
    together = torch.empty_like(case[0])
    prefill_attention(*case, AttentionOptions(0.125), together)
    for tile in case[4]:
        alone = torch.full_like(case[0], float("nan"))
        prefill_attention(*case[:4], tile[None], AttentionOptions(0.125), alone)
        rows = slice(int(tile[0]), int(tile[0] + tile[1]))
        assert torch.equal(alone[rows], together[rows])


@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 40}], ids=["full", "window"])
def test_a_token_by_itself_gets_what_it_had_in_its_chunk(kv, settings):
    case, scales = make_prefill(((70, 0, 0), (9, 81, 1)), padding=0, kv=kv)
    q, pages, tiles = case[0], case[1:4], case[4]
    chunk, alone = torch.empty_like(q), torch.full_like(q[[69, 78]], float("nan"))
    options = AttentionOptions(q.shape[-1] ** -0.5, **scales, **settings)
    prefill_attention(q, *pages, tiles, options, chunk)
    lengths = torch.tensor([70, 90], dtype=torch.int32, device=DEVICE)
    prefill_attention(q[[69, 78]], *pages, lengths, options, alone)
    # To the bit on a GPU; the interpreter's products are numpy's, whose order follows a row's place.
    assert torch.allclose(alone, chunk[[69, 78]], rtol=1e-4, atol=1e-5)
    nobody = torch.full_like(alone, float("nan"))
    prefill_attention(q[:2], *pages, torch.zeros_like(lengths), options, nobody)
    assert not nobody.any()
