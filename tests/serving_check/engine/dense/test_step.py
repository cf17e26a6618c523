"""Steps without transformers' modules: the same tokens as with them, and only for models they fit."""

import copy

import pytest
import torch
from scalegate.kernels.cpu.coded_matmul import instructions_for
from scalegate.kernels.cpu.coded_tile import Instructions
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.modules.merged_linear import layers_with_one_input, merge_unquantized
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.pipeline.quantization.quantizers.all_quantizers import QUANTIZERS
from scalegate.serving_check.engine.attention import attention_layers
from scalegate.serving_check.engine.dense.step import DenseStep
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
DENSE = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, with biases": Qwen2Config(**SIZES | {"hidden_size": 128}),
    "qwen3, with norms of heads": Qwen3Config(**SIZES),
    "mistral, with a sliding window": MistralConfig(**SIZES, sliding_window=24),
    "llama with yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
}
OTHERS = {
    "granite multiplies residuals": GraniteConfig(**SIZES, residual_multiplier=0.5),
    "gemma2 has more norms": Gemma2Config(**SIZES),
    "angles depend on the length": LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
    "norms of 48 numbers are not compiled": LlamaConfig(**SIZES | {"hidden_size": 48}),
}
LENGTHS = (1, 2, 30, 71)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def merged_model(config, dtype=torch.bfloat16) -> PreTrainedModel:
    """A model with random weights, merged as a loader merges them."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    merge_unquantized(model, layers_with_one_input(model, lambda: attention_layers(model)))
    return model


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with all layers but the head in INT4, as a loader packs them."""
    layers = {
        name: module
        for name, module in model.model.named_modules(remove_duplicate=False)
        if type(module) is torch.nn.Linear
    }
    spec, done = Int4(32), {}
    for name, linear in layers.items():
        if linear not in done:
            values = linear.weight.detach()
            weight = QUANTIZERS[spec.name].quantize(values, spec, values.dtype, {}).weight
            packed = LAYOUTS["cpu_int4_tiles"].pack(weight, linear.weight.dtype)
            done[linear] = QuantizedLinear(packed, linear.bias)
        parent, _, leaf = name.rpartition(".")
        setattr(model.model.get_submodule(parent), leaf, done[linear])
    return model


def engine_of(model: PreTrainedModel, **options) -> Engine:
    return Engine(model, EngineOptions(max_num_seqs=8, kv_cache_tokens=4096, **options), frozenset())


def step_of(engine: Engine) -> DenseStep | None:
    return engine.runner._forward._dense


def answers(engine: Engine) -> list[tuple[int, ...]]:
    prompts = [[(11 * index + length) % 512 for index in range(length)] for length in LENGTHS]
    return [each.token_ids for each in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_tokens_are_those_of_transformers_modules(config, dtype):
    engine = engine_of(merged_model(config, dtype), prefill_chunk=29)  # which cuts two of the prompts
    assert step_of(engine) is not None
    without_modules = answers(engine)
    engine.runner._forward._dense = None
    assert without_modules == answers(engine)
    assert len(set(without_modules[0])) > 2, "a model that repeats itself would hide faults"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_quantized_layers_in_lists_of_calls_give_the_same_tokens(config, threads, monkeypatch):
    """Products, attention and activation are in the lists; two threads share the work of the first two."""
    monkeypatch.setattr("scalegate.layouts.kv.cpu.WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    config = copy.deepcopy(config)
    config.intermediate_size = 128
    engine = engine_of(quantized(merged_model(config)), prefill_chunk=29)
    step = step_of(engine)
    assert step is not None and step.decodes
    # Biases are added by modules, and other CPUs multiply in float32.
    in_one_list = instructions_for(torch.bfloat16) is Instructions.BF16 and config.model_type != "qwen2"
    assert (len(step._program._decoding) == 1) is in_one_list
    without_modules = answers(engine)
    engine.runner._forward._dense = None
    assert without_modules == answers(engine)
    assert len(set(without_modules[0])) > 2, "a model that repeats itself would hide faults"


def test_many_rows_are_multiplied_outside_of_the_lists_of_calls(monkeypatch):
    """There a layout may decode a weight once for all rows, which a call does not."""
    monkeypatch.setattr("scalegate.serving_check.engine.dense.program.MANY_ROWS", 30)
    rows: list[int] = []
    layout = LAYOUTS["cpu_int4_tiles"]
    product_by = type(layout).product_by
    counted = lambda self, packed: lambda x: (rows.append(len(x)), product_by(self, packed)(x))[1]  # noqa: E731
    monkeypatch.setattr(type(layout), "product_by", counted)
    config = LlamaConfig(**SIZES | {"intermediate_size": 128})
    engine = engine_of(quantized(merged_model(config)), prefill_chunk=30)
    rows.clear()
    without_modules = answers(engine)
    # Other CPUs have no calls of this layout, and multiply few rows so too.
    has_calls = instructions_for(torch.bfloat16) is Instructions.BF16
    assert 30 in rows and (min(rows) == 30 or not has_calls)
    engine.runner._forward._dense = None
    assert without_modules == answers(engine)


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_another_model_keeps_its_modules(config):
    assert step_of(engine_of(merged_model(config))) is None


@pytest.mark.parametrize("name", ["auto", "fp8", "kvarn_k4v4_g64"])
def test_padded_steps_give_the_same_tokens_in_every_kind_of_pages(name):
    found = []
    for is_dense in (True, False):
        engine = engine_of(
            merged_model(LlamaConfig(**SIZES | {"head_dim": 64})), kv_cache_dtype=name, decode_buckets=(8,)
        )
        assert step_of(engine) is not None
        if not is_dense:
            engine.runner._forward._dense = None
        found.append(answers(engine))
    assert found[0] == found[1]


def test_angles_past_the_first_ones_are_computed():
    engine = engine_of(merged_model(LlamaConfig(**SIZES)))
    prompt = [[index % 512 for index in range(1020)]]
    step, without_modules = step_of(engine), engine.generate(prompt, GREEDY)
    assert len(step._angles[0]) == 2048
    engine.runner._forward._dense = None
    assert without_modules[0].token_ids == engine.generate(prompt, GREEDY)[0].token_ids


class Scaled(torch.nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 3


def test_an_embedding_of_another_class_is_called():
    model = merged_model(LlamaConfig(**SIZES))
    plain = answers(engine_of(model))
    model.model.embed_tokens.__class__ = Scaled
    engine = engine_of(model)
    assert step_of(engine) is not None
    scaled = answers(engine)
    engine.runner._forward._dense = None
    assert scaled == answers(engine)
    assert scaled != plain


def test_a_hook_is_called_in_every_step():
    model = merged_model(LlamaConfig(**SIZES))
    engine, calls = engine_of(model), []
    expected = answers(engine)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert answers(engine) == expected
    assert len(calls) >= GREEDY.max_tokens
    hook.remove()
    calls.clear()
    assert answers(engine) == expected and not calls


def test_long_prompts_are_left_to_torchs_threads(monkeypatch):
    step = step_of(engine_of(merged_model(LlamaConfig(**SIZES))))
    monkeypatch.setattr("scalegate.serving_check.engine.dense.step.LARGEST_ON_ONE_THREAD", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert step.takes(2) and not step.takes(3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert step.takes(3)


def test_batch_invariant_steps_keep_their_modules():
    assert step_of(engine_of(merged_model(LlamaConfig(**SIZES)), batch_invariance="pin")) is None
