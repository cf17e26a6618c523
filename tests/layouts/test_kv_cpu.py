"""Decoding over plain pages on a CPU by the compiled kernel, against attention written out in float64."""

import numpy as np
import pytest
import torch
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.attention_metadata import AttentionMetadata, HostMetadata
from scalegate.layouts.kv.cpu import CpuLayerKV
from scalegate.layouts.kv.layer import StoredPages, Workspaces
from scalegate.tests.kernels.attention.test_paged_attention import GROUP, KV_HEADS, VARIANTS, by_hand
from torch import Tensor

PAGE = 4
LENGTHS = [1, 3, 4, 5, 17, 70, 300]
SOFTMAX_ERROR = 2.0**-17
"""Of a weight, relative: scores of up to 16 are sums of fp32, whose last bit is 2**-20, and there are few of
these errors in one; the exponential adds 2**-22."""


class Requests:
    """Requests of LENGTHS in scattered pages; the last token of each is not stored yet."""

    def __init__(self, dtype: torch.dtype, key_dim: int, value_dim: int):
        torch.manual_seed(0)
        counts = [-(-length // PAGE) for length in LENGTHS]
        order = np.random.default_rng(0).permutation(sum(counts)) + 1
        pages = sum(counts) + 1, PAGE, KV_HEADS
        self.key_pages = torch.randn(*pages, key_dim).to(dtype)
        self.value_pages = torch.randn(*pages, value_dim).to(dtype)
        self.table = np.zeros((len(LENGTHS), max(counts)), np.int32)
        self.keys, self.values, used = list[Tensor](), list[Tensor](), 0
        for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
            self.table[row, :count] = order[used : used + count]
            used += count
            positions = torch.arange(length - 1)
            slots = torch.from_numpy(self.table[row, positions // PAGE]) * PAGE + positions % PAGE
            self.keys.append(torch.randn(length, KV_HEADS, key_dim).to(dtype))
            self.values.append(torch.randn(length, KV_HEADS, value_dim).to(dtype))
            self.key_pages.view(-1, KV_HEADS, key_dim)[slots] = self.keys[-1][:-1]
            self.value_pages.view(-1, KV_HEADS, value_dim)[slots] = self.values[-1][:-1]
        self.query = torch.randn(len(LENGTHS), KV_HEADS * GROUP, key_dim).to(dtype)

    def attend(self, rows: list[int], options: AttentionOptions, sinks: Tensor | None) -> Tensor:
        """A decode step of these requests, over pages of its own."""
        stored = StoredPages(self.key_pages.clone(), self.value_pages.clone(), None, None)
        layer = CpuLayerKV(stored, Workspaces())
        assert layer._decoder is not None
        count, lengths = len(rows), np.array([LENGTHS[row] for row in rows], np.int32)
        nothing = np.empty(0, np.int32)
        table = np.ascontiguousarray(self.table[rows])
        host = HostMetadata(count, 0, count, table, lengths, nothing, nothing, PAGE)
        empty = torch.empty(0)
        metadata = AttentionMetadata(*[empty] * 8, None, PAGE, host)
        new = [torch.stack([of[row][-1] for row in rows]) for of in (self.keys, self.values)]
        # As a model's merged product leaves them: not contiguous.
        key, value = (torch.stack([x, x], dim=1)[:, 0] for x in new)
        return layer.forward(self.query[rows], key, value, metadata, options, sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (80, 16), (16, 144)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_equals_attention_by_hand(dtype, key_dim, value_dim, variant):
    options, has_sinks = VARIANTS[variant]
    requests = Requests(dtype, key_dim, value_dim)
    sinks = torch.randn(KV_HEADS * GROUP) if has_sinks else None
    output = requests.attend(list(range(len(LENGTHS))), options, sinks)
    for row, length in enumerate(LENGTHS):
        keys, values = requests.keys[row], requests.values[row]
        expected = by_hand(requests.query[row], keys, values, length - 1, options, sinks)
        largest = values.double().abs().max()
        bound = torch.finfo(dtype).eps / 2 * expected.abs() + 2 * SOFTMAX_ERROR * largest
        assert ((output[row].double() - expected).abs() <= bound).all(), LENGTHS[row]


def test_a_request_gets_the_same_bits_alone_among_others_and_on_several_threads(monkeypatch):
    requests, options = Requests(torch.bfloat16, 32, 32), AttentionOptions(0.3)
    together = requests.attend(list(range(len(LENGTHS))), options, None)
    monkeypatch.setattr("scalegate.layouts.kv.cpu.WORTH_A_THREAD", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(requests.attend(list(range(len(LENGTHS))), options, None), together)
    finally:
        torch.set_num_threads(threads)
    for row in range(len(LENGTHS)):
        assert torch.equal(requests.attend([row], options, None)[0], together[row])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 24), (torch.float64, 32)])
def test_pages_that_the_kernel_does_not_take_are_left_to_the_reference(dtype, dim):
    pages = torch.zeros(2, PAGE, KV_HEADS, dim, dtype=dtype)
    assert CpuLayerKV(StoredPages(pages, pages.clone(), None, None), Workspaces())._decoder is None
