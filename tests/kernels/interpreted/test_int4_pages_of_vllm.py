"""Our int4 pages in the memory that vLLM gives a layer, written and read as its attention backend does; see
conftest.py.
"""

import importlib

import numpy as np
import pytest
import torch
from scalegate.kernels.attention.decode import DecodeWorkspace
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.per_token import int4
from scalegate.kernels.hadamard import rotate_reference
from scalegate.tests.vllm_plugin import stand_in
from scalegate.vllm_plugin import int4_pages
from scalegate.vllm_plugin.int4_pages import Step, attend, memory_shape, pages_in, prompts_of, store, warm_up
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Half a page is one side of a product, of which matrix units take 32 bytes and the interpreter any number.
PAGE, DIM, KV_HEADS, HEADS, WIDTH = 64 if DEVICE.type == "cuda" else 16, 64, 2, 4, 4
NUM_PAGES = 16
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
MAX_ERROR = 2e-2 if DEVICE.type == "cuda" else 4e-3
"""A relative error. A GPU rounds keys and queries to 16 bits before it rotates them, so some codes are the
next ones; on a CPU the results of prompts are rounded to fp16 before they are rotated back.
"""


def test_a_page_takes_as_many_bytes_as_vllm_counts():
    """vLLM's `AttentionSpec.page_size_bytes`: half a byte a channel, and four bytes a token and head for keys
    and for values each.
    """
    for dim in (64, 128, 256):
        counted = 2 * (PAGE * KV_HEADS * dim // 2 + PAGE * KV_HEADS * 4)
        assert np.prod(memory_shape(1, PAGE, KV_HEADS, dim)) == counted


def test_no_byte_of_the_memory_belongs_to_two_parts():
    memory = torch.zeros(memory_shape(NUM_PAGES, PAGE, KV_HEADS, DIM), dtype=torch.uint8)
    for part, side in enumerate(pages_in(memory)):
        side.words.view(torch.uint8).add_(1 + 2 * part)
        side.scales.view(torch.uint8).add_(2 + 2 * part)
    values, counts = memory.unique(return_counts=True)
    tokens = NUM_PAGES * PAGE * KV_HEADS
    assert values.tolist() == [1, 2, 3, 4]
    assert counts.tolist() == [tokens * DIM // 2, tokens * 4] * 2


class Served:
    """Requests in vLLM's memory, and their keys and values in fp64 as they are stored."""

    def __init__(self, requests: int, softcap: float | None = None):
        memory = torch.zeros(memory_shape(NUM_PAGES, PAGE, KV_HEADS, DIM), dtype=torch.uint8, device=DEVICE)
        self.pages = pages_in(memory)
        self.options = AttentionOptions(DIM**-0.5, softcap=softcap)
        self.workspace = DecodeWorkspace.allocate(requests + 1, HEADS, DIM, WIDTH * PAGE, DEVICE)
        numbers = np.random.default_rng(0).permutation(NUM_PAGES - 1)[: requests * WIDTH] + 1
        # Rows of a wider table, and a row of padding, as vLLM hands them over.
        table = torch.zeros(requests + 1, WIDTH + 3, dtype=torch.int32)
        table[:requests, :WIDTH] = torch.from_numpy(numbers.reshape(requests, WIDTH))
        self.table = table.to(DEVICE)
        self.contexts = [torch.zeros(2, 0, KV_HEADS, DIM) for _ in range(requests)]
        self.generator = torch.Generator().manual_seed(0)
        self.uneven = torch.rand(DIM, generator=self.generator) * 3 + 0.2

    def random(self, tokens: int, heads: int) -> Tensor:
        """[tokens, heads, D], a part of what one product computes, as in vLLM."""
        wide = torch.randn(tokens, heads + 1, DIM, generator=self.generator) * self.uneven
        return wide.to(DEVICE, DTYPE)[:, :heads]

    def step(self, counts: list[int], most_pages: int = 1 << 20, padding: int = 0) -> tuple[float, Step]:
        """Each request's new tokens, decoding requests first; return the relative error, and the step."""
        starts = np.cumsum([0, *counts]).astype(np.int32)
        tokens = int(starts[-1])
        query, key, value = (self.random(tokens + padding, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        slots = torch.full((tokens + padding,), -1)
        for row, count in enumerate(counts):
            new = torch.stack([key, value])[:, starts[row] : starts[row] + count].float().cpu()
            before = self.contexts[row].shape[1]
            self.contexts[row] = torch.cat([self.contexts[row], new], 1)
            at = torch.arange(before, before + count)
            pages = self.table[row].cpu().long()[at // PAGE]
            slots[starts[row] : starts[row] + count] = pages * PAGE + at % PAGE
        store(key, value, slots.to(DEVICE), self.pages)
        lengths = np.array([context.shape[1] for context in self.contexts], np.int32)
        num_decodes = sum(count == 1 for count in counts)
        prompts = None
        if num_decodes < len(counts):
            prompts = prompts_of(num_decodes, starts, lengths, self.table[: len(counts)], PAGE, most_pages)
        elif padding:  # in a full graph, each token of padding is a request of no length
            num_decodes, tokens = num_decodes + padding, tokens + padding
            lengths = np.append(lengths, [0] * padding).astype(np.int32)
        step = Step(tokens, num_decodes, self.table, torch.from_numpy(lengths).to(DEVICE), prompts)
        out = torch.full_like(query, torch.nan).contiguous()
        attend(query, self.pages, step, self.workspace, self.options, out)
        got, want = out[: starts[-1]].double().cpu(), self.reference(query.double().cpu(), counts, starts)
        if prompts is None and padding:
            assert not out[starts[-1] :].any(), "padding in a graph is written, and finite"
        return float((got - want).norm() / want.norm()), step

    def reference(self, query: Tensor, counts: list[int], starts: np.ndarray) -> Tensor:
        out = torch.zeros(int(starts[-1]), HEADS, DIM, dtype=torch.float64)
        for row, count in enumerate(counts):
            keys, values = (
                rotate_reference(int4.dequantize_reference(int4.quantize_reference(rotate_reference(side))))
                for side in self.contexts[row]
            )
            for index in range(count):
                seen = len(keys) - count + index + 1
                for head in range(HEADS):
                    at, group = int(starts[row]) + index, head // (HEADS // KV_HEADS)
                    scores = keys[:seen, group].double() @ query[at, head] * self.options.scale
                    if self.options.softcap:
                        scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
                    out[at, head] = scores.softmax(0) @ values[:seen, group].double()
        return out


@torch.inference_mode()
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_prompts_in_chunks_and_then_answers(softcap, monkeypatch):
    monkeypatch.setattr(int4_pages, "WIDEN_FROM", 8)
    served = Served(3, softcap)
    error, step = served.step([PAGE + 3, 2, PAGE // 2])
    assert error < MAX_ERROR
    assert step.prompts.pages is not None, "pages are decoded once"
    assert len(step.prompts.pages) == 2 + 1 + 1, "each context's own pages, and no others"
    error, step = served.step([1, 1, 4])
    assert error < MAX_ERROR
    assert step.prompts.pages is None, "too few tokens for it"
    assert served.step([1, 1, 1])[0] < MAX_ERROR
    assert served.step([1, 1, 1], padding=1)[0] < MAX_ERROR


@torch.inference_mode()
def test_a_step_that_would_decode_too_many_pages_multiplies_codes(monkeypatch):
    monkeypatch.setattr(int4_pages, "WIDEN_FROM", 8)
    served = Served(2)
    error, step = served.step([PAGE + 1, PAGE + 1], most_pages=3)
    assert step.prompts.pages is None
    assert error < MAX_ERROR
    error, step = served.step([1, PAGE], most_pages=3)
    assert step.prompts.pages is not None, "the decoding request's pages do not count"
    assert error < MAX_ERROR


@torch.inference_mode()
def test_a_wrong_page_would_be_seen():
    served = Served(2)
    served.step([PAGE, PAGE])
    served.table[0, 0] = served.table[1, 0]
    assert served.step([1, 1])[0] > 0.1


@torch.inference_mode()
def test_what_vllm_calls_does_the_same_in_a_layers_memory(monkeypatch):
    stand_in.install(monkeypatch).config.device_config.device_type = DEVICE.type
    attention = importlib.import_module("scalegate.vllm_plugin.attention")
    served = Served(1)
    layer = attention.ScalegateAttention(HEADS, DIM, served.options.scale, KV_HEADS)
    shape = attention.ScalegateAttentionBackend.get_kv_cache_shape(NUM_PAGES, PAGE, KV_HEADS, DIM)
    query, key, value = (served.random(1, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    results = []
    # vLLM measures its memory with other tensors than it serves with.
    for _ in range(2):
        memory = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        layer.do_kv_cache_update(None, key, value, memory, torch.tensor([PAGE + 3], device=DEVICE))
        step = Step(1, 1, torch.tensor([[1]]).int().to(DEVICE), torch.tensor([4]).int().to(DEVICE), None)
        results.append(layer.forward(None, query, key, value, memory, step, torch.empty_like(query)))
        for stored, side in zip(pages_in(memory), (key, value), strict=True):
            want = int4.quantize_reference(rotate_reference(side[0].float().cpu()))
            assert (stored.words[1, :, 3].cpu() == want.words).float().mean() > 0.9
            assert stored.scales.count_nonzero() == want.scales.count_nonzero(), "and nothing else"
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()


@torch.inference_mode()
def test_warming_up_takes_every_way(monkeypatch):
    monkeypatch.setattr(int4_pages, "LARGE", 24)
    monkeypatch.setattr(int4_pages, "WIDEN_FROM", 16)
    taken = []

    def watched(name: str):
        kernel = getattr(int4_pages, name)

        def watch(query, *rest, **named) -> None:
            taken.append((name, len(query)))
            kernel(query, *rest, **named)

        return watch

    for name in ("token_decode", "token_prefill", "attend_prefill"):
        monkeypatch.setattr(int4_pages, name, watched(name))
    workspace = DecodeWorkspace.allocate(1, HEADS, DIM, PAGE, DEVICE)
    warm_up(KV_HEADS, PAGE, workspace, AttentionOptions(0.1), torch.float16)
    assert taken == [
        ("token_decode", 1),
        ("token_prefill", 2),
        ("attend_prefill", 16),
        ("attend_prefill", 25),
    ]
