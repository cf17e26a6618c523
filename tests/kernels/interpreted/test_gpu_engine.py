"""The engine's GPU steps without a GPU: kernels interpreted, graphs replayed by calling what they hold.

Decode graphs, mixed batches and paged kernels must give the tokens that the CPU engine gives. Where there is
a GPU, tests/serving_check/engine/test_gpu.py has the real thing; see conftest.py.
"""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from scalegate.layouts.kv.attention_chunks import ChunkedLayerKV
from scalegate.layouts.kv.cuda import CudaLayerKV
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn.cpu import KVarNCpuLayerKV
from scalegate.layouts.kv.kvarn.cuda import KVarNCudaLayerKV
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.layouts.kv.layer import PoolSize, StoredPages, Workspaces
from scalegate.layouts.states.all_states import STATE_FORMATS
from scalegate.layouts.states.cuda_slots import CudaStateSlots
from scalegate.serving_check.engine import device_copies
from scalegate.serving_check.engine.attention import served_layers
from scalegate.serving_check.engine.compiling import cuda_graphs
from scalegate.serving_check.engine.cuda_runner import CudaRunner
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.registered import registered
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.long

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=3, seed=7, ignore_eos=True, **settings)
    for settings in (
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 50},
    )
]
SIZES = {"max_num_seqs": 2, "max_model_len": 48}
WAYS = {
    "overlapped": {"prefill_chunk": 16},
    "short chunks while decoding": {"prefill_chunk": 40, "chunk_while_decoding": 7, "page_size": 32},
    "no graphs": {"prefill_chunk": 16, "kv_cache_tokens": 64},
    "eight bits": {"prefill_chunk": 16, "kv_cache_dtype": "int8_per_token_head"},
    "eight bits, no graphs": {"prefill_chunk": 16, "kv_cache_dtype": "int8_per_token_head"},
    "per-token": {"prefill_chunk": 16, "batch_invariance": "per-token"},
    "whole pages, no graphs": {"prefill_chunk": 40, "kv_cache_dtype": "kvarn"},
}


class GraphStandIn:
    """Stands for a CUDA graph: what it captured is called again, into the tensors it gave at first."""

    def __init__(self, run: Callable[[], tuple[Tensor, Tensor]], result: tuple[Tensor, Tensor]):
        self.run, self.result = run, result

    def replay(self) -> None:
        for to, values in zip(self.result, self.run(), strict=True):
            to.copy_(values)


class NoEvent:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, start = torch.zeros, device_copies.DeviceToHostCopy.__init__

    def record(self, run):
        result = tuple(tensor.clone() for tensor in run())
        return GraphStandIn(run, result), result

    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_record", record)
    monkeypatch.setattr(
        device_copies.DeviceToHostCopy, "__init__", lambda self, tensor: start(self, tensor.clone())
    )


@pytest.fixture(autouse=True)
def short_pages():
    with registered(KV_FORMATS, "kvarn", KVarN(value_bits=2, group_size=16)):
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(256) for _ in range(length)] for length in (1, 35, 5)]


def engine_on_kernels(model: PreTrainedModel, **sizes) -> Engine:
    """An engine built for the CPU, given the runner and the pages it would have on a GPU."""
    options = EngineOptions(**{**SIZES, "page_size": 16, **sizes})
    if options.batch_invariance != "tuned":
        model = copy.deepcopy(model)  # whose linear layers are replaced
    engine = Engine(model, options, frozenset())
    pool = engine.pool
    size, workspaces = PoolSize(0, pool.page_size, *pool.block_table.shape), Workspaces()
    served = served_layers(model)
    layers = served.attention
    for key, shape in served.states.items():
        pool.states[key] = CudaStateSlots(STATE_FORMATS[key.name], shape, len(pool.block_table), model.device)
    for index, layer in pool.layers.items():
        shape, chunk = layers[index].shape, layers[index].chunk
        if isinstance(layer, KVarNCpuLayerKV):
            pool.layers[index] = KVarNCudaLayerKV(layer.storage, shape.padded(), size, workspaces)
            continue
        stored = layer.storage.stored if isinstance(layer, ChunkedLayerKV) else layer.stored
        sides = (stored.key_pages, stored.value_pages, stored.key_scale, stored.value_scale)
        heads_first = (None if side is None else side.transpose(1, 2).contiguous() for side in sides)
        pool.layers[index] = CudaLayerKV(StoredPages(*heads_first), shape, size, workspaces)
        if isinstance(layer, ChunkedLayerKV):
            pool.layers[index] = ChunkedLayerKV(pool.layers[index], chunk, True, workspaces)
    buckets, chunk = (1, options.max_num_seqs), engine.scheduler.prefill_chunk
    engine.runner = CudaRunner(
        model, layers, pool, buckets, chunk, compiled=False, batch_invariance=options.batch_invariance
    )
    return engine


@pytest.mark.parametrize("way", exhaustive_but(WAYS, "overlapped", "eight bits, no graphs"))
def test_tokens_are_those_of_the_cpu_engine(model, prompts, way: str):
    kv_cache_dtype = WAYS[way].get("kv_cache_dtype", "unquantized")
    prompts = prompts[:2] if way.startswith("whole pages") else prompts
    params = SAMPLED if way == "overlapped" else GREEDY
    config = EngineOptions(kv_cache_dtype=kv_cache_dtype, **SIZES)
    expected = Engine(model, config, frozenset()).generate(prompts, params)
    engine = engine_on_kernels(model, **WAYS[way])
    runner = engine.runner
    engine._overlapped = way == "overlapped"
    no_graphs = way.endswith("no graphs")
    runner.mixed_buckets = () if no_graphs else runner.mixed_buckets
    answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    mixed = [shape for shape in runner.graphs.captured if not shape.decode_only]
    assert engine.pool.usage == 0 and bool(mixed) == (not no_graphs)


@pytest.mark.exhaustive
def test_contexts_of_several_chunks_have_the_tokens_of_the_cpu_engine():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama4_text",
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        vocab_size=256,
        max_position_embeddings=256,
        attention_chunk_size=128,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    numbers = random.Random(1)
    # One prompt crosses a chunk's end while it is read, one while it is answered.
    prompts = [[numbers.randrange(256) for _ in range(length)] for length in (150, 127)]
    sizes = {"max_num_seqs": 2, "max_model_len": 160}
    expected = Engine(copy.deepcopy(model), EngineOptions(**sizes), frozenset()).generate(prompts, GREEDY)
    engine = engine_on_kernels(model, **sizes, prefill_chunk=100)
    assert any(isinstance(layer, ChunkedLayerKV) for layer in engine.pool.layers.values())
    engine._overlapped = True
    answers = engine.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


STATES = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
        "mamba_d_state": 8,
    },
    "zaya": {"num_experts": 2, "moe_intermediate_size": 32, "router_hidden_size": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 32, "num_hidden_layers": 3},
}
"""A model for each state format; all of them begin with a short convolution."""


@pytest.mark.parametrize("kind", exhaustive_but(STATES, "qwen3_5_text"))
def test_layers_with_a_state_have_the_tokens_of_the_cpu_engine(kind: str):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(kind, **sizes | STATES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    numbers = random.Random(1)
    # Two requests at once, so that the third takes a slot that was used, while another one decodes.
    prompts = [[numbers.randrange(1, 256) for _ in range(length)] for length in (21, 3, 19)]
    options = EngineOptions(**SIZES)
    expected = Engine(copy.deepcopy(model), options, frozenset()).generate(prompts, GREEDY)
    engine = engine_on_kernels(model, prefill_chunk=16)
    assert len(engine.pool.states) > 0
    engine._overlapped = True
    answers = engine.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_long_and_short_requests_share_steps_under_longrope():
    torch.manual_seed(0)
    original = 20
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": original,
    }
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        pad_token_id=0,
        max_position_embeddings=48,
        original_max_position_embeddings=original,
        rope_parameters=rope,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    numbers = random.Random(1)
    # One stays short, one outgrows the original context while it is answered, one is long from the start.
    prompts = [[numbers.randrange(256) for _ in range(length)] for length in (3, original - 1, original + 9)]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    sizes = {"max_num_seqs": 3, "max_model_len": 48}
    expected = Engine(copy.deepcopy(model), EngineOptions(**sizes), frozenset()).generate(prompts, params)
    engine = engine_on_kernels(model, **sizes, prefill_chunk=16)
    engine._overlapped = True
    mixed, run = [], engine.runner.run
    engine.runner.run = lambda batch: mixed.append(set(batch.is_long_by_row.values())) or run(batch)
    answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert {False, True} in mixed
