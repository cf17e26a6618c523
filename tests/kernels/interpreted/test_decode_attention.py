"""The paged decode kernel against its fp64 reference; see conftest.py."""

import pytest
import torch
from scalegate.kernels.attention.decode import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    decode_split_tokens,
)
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.tests.exhaustive import exhaustive_but

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_case(heads=4, kv_heads=2, head_dim=64, page=16, lengths=(1, 17, 300), kv="float32", seed=0):
    """Random pages in a shuffled order, rows of different lengths, and nothing but NaN outside them."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-length // page) for length in lengths) + 1
    pages = len(lengths) * width
    table = torch.randperm(pages, generator=generator).view(len(lengths), width).int()
    shape = (pages, kv_heads, page, head_dim)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    scales = {}
    if kv == "float8_e4m3fn":
        scales = {
            "key_scale": torch.rand(kv_heads, generator=generator) + 0.1,
            "value_scale": torch.rand(kv_heads, generator=generator) + 0.1,
        }
        keys, values = (keys * 3).to(torch.float8_e4m3fn), (values * 3).to(torch.float8_e4m3fn)
    elif kv == "int8":
        scales = {
            "key_scale": torch.rand(shape[:3], generator=generator) / 100 + 0.01,
            "value_scale": torch.rand(shape[:3], generator=generator) / 100 + 0.01,
        }
        keys, values = (
            torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for _ in range(2)
        )
    else:
        for row, length in enumerate(lengths):
            for page_index in range(width):
                first_free = max(0, min(page, length - page_index * page))
                keys[table[row, page_index], :, first_free:] = float("nan")
                values[table[row, page_index], :, first_free:] = float("nan")
        dtype = getattr(torch, kv)
        q, keys, values = q.to(dtype), keys.to(dtype), values.to(dtype)
    case = [q, keys, values, table, torch.tensor(lengths, dtype=torch.int32)]
    return [t.to(DEVICE) for t in case], {name: t.to(DEVICE) for name, t in scales.items()}


def relative_error(case, max_context=1024, **settings):
    options = AttentionOptions(case[0].shape[-1] ** -0.5, **settings)
    workspace = DecodeWorkspace.allocate(
        case[0].shape[0], case[0].shape[1], case[0].shape[2], max_context, DEVICE
    )
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    out = torch.full_like(case[0], float("nan"))
    got = decode_attention(*case, workspace, options, out).double()
    want = decode_attention_reference(*case, options)
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("head_dim", exhaustive_but([64, 96, 128, 256], 64, 256))
@pytest.mark.parametrize("heads,kv_heads", exhaustive_but([(2, 2), (8, 2), (16, 1)], (8, 2)))
def test_any_head_size_and_grouping(head_dim, heads, kv_heads):
    case, _ = make_case(heads, kv_heads, head_dim, lengths=(1, 17, 70, 140, 300))
    assert relative_error(case) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window": 40}, marks=pytest.mark.exhaustive),
        {"sliding_window": 270},
        pytest.param({"softcap": 3.0}, marks=pytest.mark.exhaustive),
        pytest.param({"sinks": torch.linspace(-2, 5, 4, device=DEVICE)}, marks=pytest.mark.exhaustive),
        {"sliding_window": 100, "softcap": 5.0, "sinks": torch.linspace(-2, 5, 4, device=DEVICE)},
    ],
    ids=["window", "window-over-two-splits", "softcap", "sinks", "all"],
)
def test_window_softcap_and_sinks(options):
    case, _ = make_case(lengths=(1, 40, 100, 250, 300, 513))
    assert relative_error(case, **options) < 1e-3


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "sinks"])
def test_each_option_changes_the_result(option):
    values = {"sliding_window": 40, "softcap": 1.0, "sinks": torch.full((4,), 3.0, device=DEVICE)}
    case, _ = make_case(lengths=(300,))
    plain = decode_attention_reference(*case, AttentionOptions(0.125))
    changed = decode_attention_reference(*case, AttentionOptions(0.125, **{option: values[option]}))
    assert float((plain - changed).norm() / plain.norm()) > 0.03


@pytest.mark.parametrize("kv", ["float8_e4m3fn", "int8"])
def test_eight_bit_pages(kv):
    case, scales = make_case(kv=kv, lengths=(5, 100, 200, 300))
    assert relative_error(case, **scales) < 2e-3


def test_an_empty_row_of_a_padded_batch_is_zero():
    case, _ = make_case(lengths=(20, 0, 3))
    workspace = DecodeWorkspace.allocate(3, 4, 64, 1024, DEVICE)
    out = decode_attention(*case, workspace, AttentionOptions(0.125))
    assert torch.equal(out[1], torch.zeros_like(out[1])) and out[0].abs().sum() > 0


@pytest.mark.parametrize("length", exhaustive_but([70, 140, 300], 300))
def test_a_longer_neighbour_does_not_change_the_bits(length):
    case, _ = make_case(lengths=(length, 900))
    workspace = DecodeWorkspace.allocate(2, 4, 64, 1024, DEVICE)
    together = decode_attention(*case, workspace, AttentionOptions(0.125))
    alone = decode_attention(
        *(t[:1] if i in (0, 3, 4) else t for i, t in enumerate(case)), workspace, AttentionOptions(0.125)
    )
    assert torch.equal(together[:1], alone)


def test_the_split_depends_on_the_longest_context_admitted_alone():
    assert [decode_split_tokens(n) for n in (1, 4096, 16384, 32768, 131072)] == [256, 256, 256, 512, 2048]
