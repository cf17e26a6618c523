"""The paged reference against attention written out one query at a time, over pages in any order."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scalegate.kernels.attention import reference as paged_attention
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.reference import GatheredPages, append, attend, decode_groups, prefill_group

PAGE, KV_HEADS, GROUP, KEY_DIM, VALUE_DIM = 4, 2, 3, 8, 6
LENGTHS = [1, 3, 4, 5, 17, 70, 300]

VARIANTS = {
    "plain": (AttentionOptions(0.3), False),
    "window": (AttentionOptions(0.3, sliding_window=6), False),
    "softcap": (AttentionOptions(0.3, softcap=2.0), False),
    "sinks": (AttentionOptions(0.3), True),
    "all": (AttentionOptions(0.3, sliding_window=9, softcap=2.0), True),
}


def by_hand(query, keys, values, position: int, options: AttentionOptions, sinks):
    """One query [H, D] at `position` of a request with keys [T, H_kv, D], in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    sinks = sinks if sinks is None else sinks.double()
    first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
    output = []
    for head in range(KV_HEADS * GROUP):
        scores = keys[first : position + 1, head // GROUP] @ query[head] * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        weights = scores.exp()
        total = weights.sum() + (sinks[head].exp() if sinks is not None else 0)
        output.append((weights / total) @ values[first : position + 1, head // GROUP])
    return torch.stack(output)


@pytest.fixture
def stored():
    """Requests of LENGTHS in scattered pages, their keys and values, and pages left over from others."""
    torch.manual_seed(0)
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = np.random.default_rng(0).permutation(sum(counts)) + 1
    key_pages = torch.randn(sum(counts) + 1, PAGE, KV_HEADS, KEY_DIM)
    value_pages = torch.randn(sum(counts) + 1, PAGE, KV_HEADS, VALUE_DIM)
    table = np.zeros((len(LENGTHS), max(counts)), np.int64)
    keys, values, used = [], [], 0
    for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        keys.append(torch.randn(length, KV_HEADS, KEY_DIM))
        values.append(torch.randn(length, KV_HEADS, VALUE_DIM))
        positions = np.arange(length)
        slots = torch.from_numpy(table[row, positions // PAGE] * PAGE + positions % PAGE)
        append(key_pages, keys[-1], slots)
        append(value_pages, values[-1], slots)
    return key_pages, value_pages, table, keys, values


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_over_rows_of_all_lengths(stored, variant: str):
    options, with_sinks = VARIANTS[variant]
    key_pages, value_pages, table, keys, values = stored
    sinks = torch.randn(KV_HEADS * GROUP) if with_sinks else None
    query = torch.randn(len(LENGTHS), KV_HEADS * GROUP, KEY_DIM)
    groups = decode_groups(table, np.array(LENGTHS), PAGE, options.sliding_window, query)
    found = attend(query, key_pages, value_pages, groups, replace(options, sinks=sinks))
    for row, length in enumerate(LENGTHS):
        expected = by_hand(query[row], keys[row], values[row], length - 1, options, sinks)
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-4)


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest(stored):
    _, _, table, *_ = stored
    like = torch.zeros(1)
    assert len(decode_groups(table, np.array(LENGTHS), PAGE, None, like)) > 1
    assert len(decode_groups(table[:4], np.array(LENGTHS[:4]), PAGE, None, like)) == 1


@pytest.mark.parametrize("block", [4, paged_attention.QUERY_BLOCK])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("start", [0, 1, 4, 61])
def test_a_prefill_chunk_of_two_prompts(stored, variant: str, start: int, block: int, monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_BLOCK", block)
    options, with_sinks = VARIANTS[variant]
    key_pages, value_pages, table, keys, values = stored
    sinks = torch.randn(KV_HEADS * GROUP) if with_sinks else None
    chunks = [(5, start, 9), (4, 3, 14)]
    query = torch.randn(23, KV_HEADS * GROUP, KEY_DIM)
    groups = [
        prefill_group(0, start, 9, table[5], PAGE, options.sliding_window, query),
        prefill_group(9, 3, 14, table[4], PAGE, options.sliding_window, query),
    ]
    found = attend(query, key_pages, value_pages, groups, replace(options, sinks=sinks))
    token = 0
    for row, first, count in chunks:
        for position in range(first, first + count):
            expected = by_hand(query[token], keys[row], values[row], position, options, sinks)
            torch.testing.assert_close(found[token].double(), expected, atol=1e-5, rtol=1e-4)
            token += 1


def test_a_chunk_needs_no_bias_of_all_its_queries(stored, monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_BLOCK", 16)
    _, _, table, *_ = stored
    like = torch.zeros(1)
    assert prefill_group(0, 100, 200, table[6], PAGE, None, like).bias.shape == (1, 1, 16, 300)
    assert prefill_group(0, 100, 200, table[6], PAGE, 6, like).bias.shape == (1, 1, 16, 21)


def test_pages_gathered_in_used_memory_are_those_asked_for(stored):
    key_pages, _, table, *_ = stored
    gathered = GatheredPages()
    memory = None
    for row, length in reversed(list(enumerate(LENGTHS))):
        which = torch.from_numpy(table[row, : -(-length // PAGE)])
        copy = gathered.copy(key_pages, which)
        assert torch.equal(copy, key_pages[which])
        assert memory in (None, copy.data_ptr()), "shorter contexts need no memory of their own"
        memory = copy.data_ptr()
