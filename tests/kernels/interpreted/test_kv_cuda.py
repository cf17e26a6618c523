"""Keys and values on a GPU beside those on the CPU: one prompt, then tokens after it, in every format."""

import numpy as np
import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.cuda import CudaLayerKV
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import KVScales, KVShape, PoolSize, StoredPages, Workspaces
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.scheduler import PrefillChunk
from scalegate.serving_check.engine.sequence import Sequence
from scalegate.serving_check.engine.step_input import StepBuffers
from scalegate.tests.exhaustive import exhaustive_but

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
PAGE, HEADS, KV_HEADS, DIM, PROMPT = 16, 4, 2, 64, 37
SCALES = KVScales(torch.tensor([0.5, 0.25]), torch.tensor([0.125]))
SHAPE = KVShape(KV_HEADS, DIM, DIM, torch.float32, HEADS)
TABLE = np.array([[1, 2, 3, 4]], np.int32)


def size_of(page: int) -> PoolSize:
    return PoolSize(8, page, *TABLE.shape)


def test_keys_and_values_of_different_sizes_share_one_power_of_two():
    """DeepSeek's: padded with zeros in the pages, and gone again from what comes out."""
    generator = torch.Generator().manual_seed(1)
    narrow = KVShape(KV_HEADS, 24, 16, torch.float32, HEADS)
    wide = narrow.on(torch.device("cuda"))
    assert (wide.key_dim, wide.value_dim) == (32, 32) and narrow.on(CPU) == narrow
    options = AttentionOptions(24**-0.5)
    cpu = KV_FORMATS["unquantized"].allocate(narrow, size_of(PAGE), CPU, None, Workspaces())
    pages = [torch.zeros(8, KV_HEADS, PAGE, 32, device=DEVICE) for _ in range(2)]
    gpu = CudaLayerKV(StoredPages(*pages, None, None), wide, size_of(PAGE), Workspaces())
    request = Request()
    for count in (PROMPT, 1, 1):
        query, key, value = tokens(count, generator)
        sides = query[..., :24], key[..., :24], value[..., :16]
        on_cpu, on_gpu = request.grow(count)
        want = cpu.forward(*sides, on_cpu, options, None)
        got = gpu.forward(*(x.to(DEVICE) for x in sides), on_gpu, options, None).cpu()
        assert got.shape == want.shape == (count, HEADS, 16)
        assert float((got - want).norm() / want.norm()) < 1e-5


def on_device(layer, page: int = PAGE) -> CudaLayerKV:
    """The CPU layer's pages as CUDA lays them: heads before tokens."""
    stored = layer.stored
    scales = [
        scale if scale is None or scale.ndim == 1 else scale.transpose(1, 2)
        for scale in (stored.key_scale, stored.value_scale)
    ]
    pages = [pages.transpose(1, 2) for pages in (stored.key_pages, stored.value_pages)]
    copies = [None if x is None else x.to(DEVICE, copy=True).contiguous() for x in (*pages, *scales)]
    return CudaLayerKV(StoredPages(*copies), SHAPE, size_of(page), Workspaces())


class Request:
    """One request's steps, for the CPU and for the kernels."""

    def __init__(self) -> None:
        self.sequence = Sequence("one", [], 0, SamplingParams(), 0, 64, row=0)
        self.cpu = StepBuffers(TABLE, PAGE, 64, CPU, static=False)
        self.gpu = StepBuffers(TABLE, PAGE, 64, DEVICE, static=True)

    def grow(self, count: int):
        """The CPU's metadata and the device's for `count` more tokens: a prompt, then one by one."""
        start = len(self.sequence.tokens)
        self.sequence.tokens += [0] * count
        chunks = [PrefillChunk(self.sequence, start, count)] if count > 1 else []
        for buffers in (self.cpu, self.gpu):
            shape = buffers.shape(count, 1, 1) if chunks else buffers.decode_shape(1)
            host = buffers.stage([] if chunks else [self.sequence], chunks, shape)
            buffers.send(shape, 1)
            yield buffers.input(shape, host).attention


@pytest.fixture(autouse=True)
def no_pinned_memory_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)


class NoEvent:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def tokens(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Query, key and value [count, heads, DIM]. In memory heads come first, as in many models.

    Integers over powers of two: the interpreter rounds others to e4m3 wrongly.
    """
    shapes = [(HEADS, count, DIM), (KV_HEADS, count, DIM), (KV_HEADS, count, DIM)]
    return [(torch.randint(-7, 8, shape, generator=generator) / 8).transpose(0, 1) for shape in shapes]


@pytest.mark.parametrize("name", ["unquantized", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("window", exhaustive_but([None, 20], 20))
def test_a_prompt_and_tokens_after_it(name: str, window: int | None):
    generator = torch.Generator().manual_seed(0)
    options = AttentionOptions(DIM**-0.5, window)
    cpu = KV_FORMATS[name].allocate(SHAPE, size_of(PAGE), CPU, SCALES, Workspaces())
    gpu, request = on_device(cpu), Request()
    for count in (PROMPT, 1, 1, 1):
        query, key, value = tokens(count, generator)
        on_cpu, on_gpu = request.grow(count)
        want = cpu.forward(query, key, value, on_cpu, options, None)
        sides = (x.to(DEVICE) for x in (query, key, value))
        got = gpu.forward(*sides, on_gpu, options, None).cpu()
        assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("page", [8, 48])
def test_pages_that_the_kernels_cannot_walk_are_refused(page: int):
    layer = KV_FORMATS["unquantized"].allocate(SHAPE, size_of(page), CPU, None, Workspaces())
    with pytest.raises(UserError, match=f"pages of {page} tokens"):
        on_device(layer, page)
