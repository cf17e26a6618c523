"""Keys and values on a GPU beside those on the CPU: one prompt, then tokens after it, in every format."""

import numpy as np
import pytest
import torch
from scalegate.kernels.paged_attention import AttentionOptions
from scalegate.layouts.errors import UserError
from scalegate.layouts.kv_cuda import CudaLayerKV
from scalegate.layouts.kv_format import (
    KV_FORMATS,
    DecodeTokens,
    DeviceDecodeTokens,
    KVScales,
    KVShape,
    PoolSize,
    StoredPages,
)
from scalegate.serving_check.engine.stored_kv import packed_prompt, prompt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, HEADS, KV_HEADS, DIM, PROMPT = 16, 4, 2, 64, 37
SCALES = KVScales(torch.tensor([0.5, 0.25]), torch.tensor([0.125]))
SHAPE = KVShape(KV_HEADS, DIM, DIM, torch.float32)


def on_device(layer) -> CudaLayerKV:
    """The CPU layer's pages as CUDA lays them: heads before tokens."""
    stored = layer.stored
    scales = [
        scale if scale is None or scale.ndim == 1 else scale.transpose(1, 2)
        for scale in (stored.key_scale, stored.value_scale)
    ]
    pages = [pages.transpose(1, 2) for pages in (stored.key_pages, stored.value_pages)]
    copies = [None if x is None else x.to(DEVICE, copy=True).contiguous() for x in (*pages, *scales)]
    return CudaLayerKV(StoredPages(*copies))


def tokens(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Query, key and value. Integers over powers of two: the interpreter rounds others to e4m3 wrongly."""
    shapes = [(count, HEADS, DIM), (count, KV_HEADS, DIM), (count, KV_HEADS, DIM)]
    return [torch.randint(-7, 8, shape, generator=generator) / 8 for shape in shapes]


@pytest.mark.parametrize("name", list(KV_FORMATS))
@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_and_tokens_after_it(name: str, window: int | None):
    generator = torch.Generator().manual_seed(0)
    options = AttentionOptions(DIM**-0.5, window)
    cpu = KV_FORMATS[name].allocate(SHAPE, PoolSize(8, PAGE, 1), torch.device("cpu"), SCALES)
    gpu = on_device(cpu)

    query, key, value = tokens(PROMPT, generator)
    step = prompt(PROMPT, PAGE, torch.device("cpu"))
    cpu.append(key, value, step)
    want = cpu.attend(query, step, options, None)
    step = packed_prompt(PROMPT, PAGE, DEVICE)
    gpu.append(key.to(DEVICE), value.to(DEVICE), step)
    got = gpu.attend(query.to(DEVICE), step, options, None).cpu()
    assert float((got - want).norm() / want.norm()) < 3e-3

    workspaces: dict = {}
    for position in range(PROMPT, PROMPT + 3):
        query, key, value = tokens(1, generator)
        slots, length = torch.tensor([PAGE + position]), position + 1
        width = -(-length // PAGE)
        table = np.arange(1, width + 1)[None]
        step = DecodeTokens(slots, table, np.array([length]), np.array([0]), PAGE)
        cpu.append(key, value, step)
        want = cpu.attend(query, step, options, None)
        block_table = torch.arange(1, 5, dtype=torch.int32, device=DEVICE)[None]
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        step = DeviceDecodeTokens(slots.to(DEVICE), block_table, lengths, row, 4 * PAGE, workspaces)
        gpu.append(key.to(DEVICE), value.to(DEVICE), step)
        got = gpu.attend(query.to(DEVICE), step, options, None).cpu()
        assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("page", [8, 48])
def test_pages_that_the_kernels_cannot_walk_are_refused(page: int):
    layer = KV_FORMATS["unquantized"].allocate(SHAPE, PoolSize(2, page, 1), torch.device("cpu"), None)
    with pytest.raises(UserError, match=f"pages of {page} tokens"):
        on_device(layer)
