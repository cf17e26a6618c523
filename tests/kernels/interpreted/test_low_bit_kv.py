"""Low-bit keys and values as kernels store and read them, beside the CPU's; see conftest.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.per_token.store import TokenPages
from scalegate.layouts.kv.coded_cpu import CodedCpuLayerKV
from scalegate.layouts.kv.coded_cuda import CodedCudaLayerKV
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn.cuda import KVarNCudaLayerKV
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.layouts.kv.kvarn.storage import KVarNStorage
from scalegate.layouts.kv.layer import KVScales, KVShape, PoolSize, Workspaces
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.scheduler import PrefillChunk
from scalegate.serving_check.engine.sequence import Sequence
from scalegate.serving_check.engine.step_input import StepBuffers
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.registered import registered

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
# Half a page is one side of a product, of which matrix units take 32 bytes and the interpreter any number.
PAGE, DIM, WIDTH = 64 if DEVICE.type == "cuda" else 16, 64, 6
SHAPE = KVShape(1, DIM, DIM, torch.float32, 2)
SCALES = KVScales(torch.tensor([1 / 32]), torch.tensor([1 / 64]))
ROWS = 3
MAX_ERROR, EQUAL_BYTES = (1e-2, 0.99) if DEVICE.type == "cuda" else (3e-3, 0.999)
"""A relative error, and the share of a page's bytes, of two to four codes, that are the same. A GPU rounds
float32 rows to fp16 before it rotates them, and adds in another order: some codes are the next ones."""


class NoEvent:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def no_pinned_memory_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)


def kernels_of(name: str, shape: KVShape, size: PoolSize):
    """The layer that `name` has on a GPU."""
    form = KV_FORMATS[name]
    if DEVICE.type == "cuda":
        return form.allocate(shape.on(DEVICE), size, DEVICE, SCALES, Workspaces())
    if not isinstance(form, KVarN):
        layer = form.allocate(shape, size, CPU, SCALES, Workspaces())
        on_gpu = (size.num_pages, shape.heads, size.page_size)
        head_scales = [getattr(code, "head_scale", None) for code in layer.codes]
        parts = [code.allocate(on_gpu, CPU) for code in layer.codes]
        sides = [TokenPages(*part, scale) for part, scale in zip(parts, head_scales, strict=True)]
        return CodedCudaLayerKV(*sides, layer.rotated, shape.padded(), size, Workspaces())
    storage = KVarNStorage.allocate(shape.padded(), size, form.value_bits, CPU)
    return KVarNCudaLayerKV(storage, shape.padded(), size, Workspaces())


class Steps:
    """Requests in lockstep on both: each step's metadata, tokens and results."""

    def __init__(self, name: str, shape: KVShape = SHAPE, in_graph: bool = True):
        """in_graph: kernels are told nothing on the host, as inside a graph; if not, as in a large step."""
        self.in_graph = in_graph
        table = np.random.default_rng(0).permutation(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32) + 1
        self.is_nvfp4, self.table = name == "nvfp4", table
        self.shape, size = shape, PoolSize(ROWS * WIDTH + 1, PAGE, ROWS, WIDTH)
        self.cpu = KV_FORMATS[name].allocate(shape, size, CPU, SCALES, Workspaces())
        self.gpu = kernels_of(name, shape, size)
        longest = WIDTH * PAGE
        self.sequences = [
            Sequence(str(row), [], 0, SamplingParams(), 0, longest, row=row) for row in (2, 0, 1)
        ]
        self.buffers = [
            StepBuffers(table, PAGE, longest, device, static=static)
            for device, static in ((CPU, False), (DEVICE, True))
        ]
        self.generator = torch.Generator().manual_seed(0)
        self.uneven = torch.rand(DIM, generator=self.generator) * 3 + 0.2

    def step(self, counts: list[int], options: AttentionOptions, sinks=None, padding: int = 0) -> float:
        """Relative error of one step: sixteenths of a page each request has, 1 to decode, 0 to sit it out."""
        counts = [count * PAGE // 16 if count > 1 else count for count in counts]
        decode, chunks = [], []
        for sequence, count in zip(self.sequences, counts, strict=True):
            start = len(sequence.tokens)
            sequence.tokens += [0] * count
            if count == 1 and start:
                decode.append(sequence)
            elif count:
                chunks.append(PrefillChunk(sequence, start, count))
        tokens = sum(counts) + padding
        query, key, value = (
            self.random(tokens, heads)
            for heads in (self.shape.query_heads, self.shape.heads, self.shape.heads)
        )
        results = []
        for buffers, layer in zip(self.buffers, (self.cpu, self.gpu), strict=True):
            requests = len(decode) + len(chunks)
            only = buffers.decode_shape(tokens)
            shape = only if not chunks else buffers.shape(tokens, requests, max(1, requests))
            host = buffers.stage(decode, chunks, shape)
            buffers.send(shape, requests)
            device = CPU if layer is self.cpu else DEVICE
            told = layer is self.cpu or (bool(chunks) and not self.in_graph)
            metadata = buffers.input(shape, host if told else None).attention
            sides = (x.to(device) for x in (query, key, value))
            on = None if sinks is None else sinks.to(device)
            results.append(layer.forward(*sides, metadata, options, on).cpu())
        want, got = results
        assert torch.isfinite(got).all()
        if padding:
            assert not got[-padding:].any()
        return float((got - want).norm() / want.norm())

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        """[tokens, heads, D]; in memory heads come first, as in many models.

        NVFP4 gets scales that E4M3 has: the interpreter rounds others wrongly.
        """
        if not self.is_nvfp4:
            x = torch.randn(heads, tokens, DIM, generator=self.generator) * self.uneven
            return x.transpose(0, 1)
        x = torch.randint(-24, 25, (heads, tokens, DIM), generator=self.generator) / 32
        x[..., ::16] = 0.75
        return x.transpose(0, 1)

    def equal_codes(self) -> float:
        """The share of bytes of codes that are the same; of those that are written, nearly all are not 0."""
        if isinstance(self.cpu, CodedCpuLayerKV):
            on_cpu = [parts[0].transpose(1, 2) for parts in self.cpu.stored]
            on_gpu = [self.gpu.keys.words, self.gpu.values.words]
        else:
            on_cpu, on_gpu = (
                [layer.storage.pages.key_words, layer.storage.pages.value_words]
                for layer in (self.cpu, self.gpu)
            )
        want, got = (torch.cat([words.cpu().flatten() for words in side]) for side in (on_cpu, on_gpu))
        written = want != 0
        assert written.sum() > 100
        return float((want == got)[written].float().mean())


@pytest.fixture(autouse=True)
def short_pages():
    with (
        registered(KV_FORMATS, "kvarn_k4v2", KVarN(2, PAGE)),
        registered(KV_FORMATS, "kvarn_k4v4", KVarN(4, PAGE)),
    ):
        yield


@pytest.mark.parametrize("in_graph", exhaustive_but([True, False], True))
@pytest.mark.parametrize(
    "name",
    exhaustive_but(["kvarn_k4v2", "kvarn_k4v4", "int4_per_token_head", "nvfp4"], "int4_per_token_head"),
)
def test_prompts_in_chunks_then_decoding_over_page_ends(name: str, in_graph: bool):
    steps, options = Steps(name, in_graph=in_graph), AttentionOptions(DIM**-0.5)
    for counts in ([20, 3, 0], [13, 0, 31], [1, 12, 1], [1, 1, 1], [1, 1, 1]):
        assert steps.step(counts, options) < MAX_ERROR, counts
    assert steps.equal_codes() > EQUAL_BYTES


def test_a_page_that_a_prompt_ended_with_is_not_written_again():
    steps, options = Steps("kvarn_k4v2"), AttentionOptions(DIM**-0.5)
    steps.step([32, 31, 0], options)
    for _ in range(PAGE // 16):
        steps.step([0, 1, 0], options)
    by_prompt, by_decoding = (
        steps.gpu.storage.pages.key_words[int(steps.table[sequence.row, 1])]
        for sequence in steps.sequences[:2]
    )
    by_prompt.fill_(-1)
    assert not by_decoding.any()
    steps.step([1, 1, 0], options)
    assert bool((by_prompt == -1).all()) and by_decoding.any()


@pytest.mark.parametrize(
    "name",
    exhaustive_but(["kvarn_k4v2", "int4_per_token_head", "nvfp4"], "kvarn_k4v2", "int4_per_token_head"),
)
def test_softcap_sinks_padding_and_heads_in_threes(name: str):
    options = AttentionOptions(DIM**-0.5, None if name == "kvarn_k4v2" else 11, softcap=3.0)
    steps = Steps(name, replace(SHAPE, query_heads=3), in_graph=False)
    sinks = torch.tensor([1.0, -2.0, 3.0])
    for counts, padding in (([35, 1, 18], 2), ([1, 1, 0], 1)):
        assert steps.step(counts, options, sinks, padding) < MAX_ERROR, counts


@pytest.mark.parametrize("page", [8, 48])
def test_pages_that_the_kernels_cannot_walk_are_refused(page: int):
    with pytest.raises(UserError, match=f"pages of {page} tokens"):
        kernels_of("int4_per_token_head", SHAPE, PoolSize(4, page, 1, 2))
