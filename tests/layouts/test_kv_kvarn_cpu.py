"""KVarN's layer on a CPU: threads share a step's work and change no bit of it."""

import dataclasses

import pytest
import torch
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn import steps as kv_kvarn_steps
from scalegate.layouts.kv.layer import KVShape
from scalegate.serving_check.engine.attention import AttentionLayer, ServedLayers
from scalegate.serving_check.engine.kv_pool import KVPool
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sequence import Sequence
from scalegate.serving_check.engine.step_input import StepBuffers

CPU, SIZE, HEADS, DIM = torch.device("cpu"), 64, 2, 64
LENGTHS = (1, 64, 190, 192, 200, 448)


def decoded(threads: int) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    """A step over keys and values that are the same each time, what it stored, and in how many calls."""
    layer = AttentionLayer(KVShape(HEADS, DIM, DIM, torch.float32, 4), AttentionOptions(DIM**-0.5))
    pool = KVPool(
        ServedLayers({0: layer}), KV_FORMATS["kvarn_k4v2_g64"], {}, 30, SIZE, len(LENGTHS), 7 * SIZE, CPU
    )
    storage, generator = pool.layers[0].storage, torch.Generator().manual_seed(0)
    storage.held.normal_(generator=generator)
    for part in vars(storage.pages).values():
        part.copy_(torch.randint(1 << 10, part.shape, generator=generator))
    requests = [Sequence(str(n), [0] * n, n, SamplingParams(), 0, n + 1) for n in LENGTHS]
    for request in requests:
        pool.admit(request)
    buffers = StepBuffers(pool.block_table, SIZE, len(LENGTHS), CPU, static=False)
    shape = buffers.decode_shape(len(LENGTHS))
    metadata = buffers.input(shape, buffers.stage(requests, [], shape)).attention
    query, key, value = (
        torch.randn(len(LENGTHS), heads, DIM, generator=generator) for heads in (4, HEADS, HEADS)
    )
    before, calls, together = torch.get_num_threads(), [], pool.layers[0]._threads.call
    pool.layers[0]._threads.call = lambda all_: calls.append(len(all_)) or together(all_)
    torch.set_num_threads(threads)
    try:
        out = pool.layers[0].forward(query, key, value, metadata, layer.options, None)
    finally:
        torch.set_num_threads(before)
    return out, [storage.held, *vars(storage.pages).values()], calls


def test_threads_share_a_step_and_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    alone, stored_alone, calls = decoded(4)
    assert calls == [1, 2], "two pages become full; attending is too little work"
    monkeypatch.setattr(kv_kvarn_steps, "LEAST_SHARE", 1)
    together, stored_together, calls = decoded(4)
    assert calls == [4, 2] and torch.equal(alone, together)
    assert all(torch.equal(a, b) for a, b in zip(stored_alone, stored_together, strict=True))
    assert decoded(1)[2] == [1, 2] and torch.equal(decoded(1)[0], alone)


def test_units_are_shared_by_their_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(kv_kvarn_steps, "LEAST_SHARE", 100 * DIM)
    fields = {field.name: None for field in dataclasses.fields(kv_kvarn_steps.Run)}
    work = torch.tensor([0, 600, 700, 800]).numpy()
    run = kv_kvarn_steps.Run(**{**fields, "work": work, "rows": work[1:]})
    assert run.shares(2, DIM) == [(0, 1), (1, 1), (1, 2), (2, 6)]
    monkeypatch.setattr(kv_kvarn_steps, "LEAST_SHARE", 10**9)
    assert run.shares(2, DIM) == [(0, 6)]
