"""Each attention layer has its own storage, whoever shares its compiled code, in any order of calls."""

import numpy as np
import pytest
import torch
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.attention_metadata import AttentionMetadata
from scalegate.serving_check.engine.attention import LAYER_INDEX, attention_layers
from scalegate.serving_check.engine.compiling.compiled_layers import TUNINGS
from scalegate.serving_check.engine.forward import Forward
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sequence import Sequence
from scalegate.serving_check.engine.step_input import StepBuffers
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

LAYERS = 4


class StorageWithLog:
    """A layer's storage that notes the calls; what it gives differs from layer to layer."""

    def __init__(self, index: int, calls: list[int]):
        self.index = index
        self.calls = calls

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        self.calls.append(self.index)
        return torch.full_like(query, float(self.index + 1))


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def forward(model: PreTrainedModel, calls: list[int]) -> Forward:
    layers = attention_layers(model)
    return Forward(model, layers, {index: StorageWithLog(index, calls) for index in layers}, as_op=True)


@torch.inference_mode()
def step(forward: Forward, count: int = 3) -> Tensor:
    buffers = StepBuffers(np.ones((count, 1), np.int32), 16, count, torch.device("cpu"), static=False)
    sequences = [Sequence(str(row), [5, 6], 2, SamplingParams(), 0, 9, row=row) for row in range(count)]
    shape = buffers.decode_shape(count)
    staged = buffers.input(shape, buffers.stage(sequences, [], shape))
    return forward(staged.token_ids, staged.attention, None)


def test_layers_that_share_one_compilation_each_have_their_own_storage(
    forward: Forward, calls: list[int], monkeypatch: pytest.MonkeyPatch
):
    wanted = step(forward)
    graphs: list[list[Tensor]] = []

    def noted(graph, inputs):
        graphs.append(inputs)
        return aot_eager(graph, inputs)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend=noted, fullgraph=True))
    torch._dynamo.reset()
    with torch.inference_mode():
        forward.compile()
    calls.clear()
    assert torch.equal(step(forward), wanted)
    assert calls == list(range(LAYERS))
    assert len(graphs) == 4 * len(TUNINGS), "embedding, rotary embedding, first norm, layer with a norm"
    with_index = [inputs for inputs in graphs if any(is_index(tensor) for tensor in inputs)]
    assert len(with_index) == len(TUNINGS), "the index is an input of the layers' graphs, and of no other"


def is_index(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == () and tensor.dtype == torch.int64


def test_storage_does_not_depend_on_the_order_of_calls(
    model: PreTrainedModel, forward: Forward, calls: list[int]
):
    wanted = step(forward)
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[index] for index in (3, 1, 0, 2)])
    calls.clear()
    assert not torch.equal(step(forward), wanted)
    assert calls == [3, 1, 0, 2]


def test_the_index_is_read_on_the_host_and_not_saved_with_the_model(model: PreTrainedModel, forward: Forward):
    before = set(model.state_dict())
    indices = [getattr(layer.self_attn, LAYER_INDEX) for layer in model.model.layers]
    assert [int(index) for index in indices] == list(range(LAYERS))
    assert {index.device.type for index in indices} == {"cpu"}
    assert not any(LAYER_INDEX in name for name in before)
