"""A layer's input norm is computed by the layer before it, and nothing else changes."""

import pytest
import torch
from scalegate.serving_check.engine.attention import attention_layers
from scalegate.serving_check.engine.compiling.compiled_layers import (
    TUNINGS,
    CompiledLayers,
    model_layers,
    restore_layers,
)
from scalegate.serving_check.engine.compiling.cross_layer_fusion import (
    Carry,
    PrecomputedNorm,
    fuse_across_layers,
)
from scalegate.tests.exhaustive import exhaustive_but
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class CausalAttention:
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2)


def make(architecture: str, dtype: torch.dtype = torch.float32, **sizes: int):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    attention_layers(model)

    @torch.no_grad()
    def run(tokens: int = 37) -> Tensor:
        ids = torch.arange(tokens)[None] % SIZES["vocab_size"]
        return model(
            input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=0, paged=CausalAttention()
        ).logits

    return model, run


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list:
    """Layers are traced and run as they are, and what is traced is noted: a CPU's compiler takes minutes."""
    traced = []
    compile_ = torch.compile

    def traced_only(function, **options):
        traced.append(function)
        return compile_(function, backend="eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", traced_only)
    torch._dynamo.reset()
    return traced


@pytest.mark.parametrize("architecture", exhaustive_but(["qwen3", "gemma2", "phi3"], "phi3"))
def test_the_input_norm_of_every_layer_after_the_first_is_computed_by_the_one_before(
    architecture: str, compilations: list
):
    model, run = make(architecture)
    wanted, shorter = run(), run(21)
    chain = fuse_across_layers(model_layers(model), run)
    assert len(chain.successors) == 4 and set(chain.input_norms.values()) == {"", "input_layernorm"}
    assert torch.equal(run(), wanted)
    with CompiledLayers(model, chain):
        assert torch.equal(run(), wanted)
    assert torch.equal(run(21), shorter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_ask_their_norm_for_its_weight_are_fused_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Mamba converts a layer's input to the dtype of its norm's weight; between bf16 layers it is float32."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    sizes = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16}
    model, run = make("mamba2", dtype, **sizes)
    wanted = run()
    chain = fuse_across_layers(model_layers(model), run)
    assert len(chain.successors) == (5 if dtype == torch.float32 else 2)
    assert torch.equal(run(), wanted)
    with CompiledLayers(model, chain):
        assert torch.equal(run(), wanted)
    assert torch.equal(run(), wanted)


def test_alike_layers_share_one_trace_though_the_first_computes_its_own_norm(compilations: list):
    model, run = make("qwen3")
    with CompiledLayers(model, fuse_across_layers(model_layers(model), run)):
        run()
    assert len(compilations) == 4, "embedding, rotary embedding, first norm, layer with the norm that follows"


def test_steps_of_many_tokens_have_code_of_their_own(monkeypatch: pytest.MonkeyPatch):
    options_of_calls = []

    def noted(function, options, **_):
        def call(*args):
            options_of_calls.append("max_autotune_pointwise" in options)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", noted)
    model, run = make("qwen3")
    wanted = {tokens: run(tokens) for tokens in (21, 128, 129, 200)}
    chain = fuse_across_layers(model_layers(model), run)
    for tuning in TUNINGS:
        with CompiledLayers(model, chain, tuning):
            run(tuning.traced_tokens)
    for tokens, logits in wanted.items():
        options_of_calls.clear()
        assert torch.equal(run(tokens), logits)
        assert options_of_calls == [tokens > 128] * 7, "embedding, rotary embedding, first norm, four layers"
    restore_layers(model)
    options_of_calls.clear()
    assert torch.equal(run(21), wanted[21]) and not options_of_calls


def test_what_cannot_be_compiled_is_tried_once_for_all_that_are_like_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls = []

    def failing(function, **_):
        def call(*args):
            calls.append(args)
            raise torch._dynamo.exc.Unsupported("not today")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    model, run = make("qwen3")
    wanted = run()
    chain = fuse_across_layers(model_layers(model), run)
    for tuning in TUNINGS:
        with CompiledLayers(model, chain, tuning):
            assert torch.equal(run(), wanted)
    warned = capsys.readouterr().err.count("is served uncompiled, and slower for it: not today")
    assert len(calls) == warned == 4, "embedding, rotary embedding, first norm, layer"
    assert torch.equal(run(), wanted)


def test_a_layer_that_begins_with_attention_has_no_input_norm():
    model, run = make("olmo2")
    chain = fuse_across_layers(model_layers(model), run)
    assert list(chain.input_norms) == [model.model.norm]


def test_restoring_leaves_the_model_as_it_was(compilations: list):
    model, run = make("qwen3")
    wanted, names = run(), [name for name, _ in model.named_modules()]
    with CompiledLayers(model, fuse_across_layers(model_layers(model), run)):
        run()
    assert any(isinstance(module, PrecomputedNorm) for module in model.modules())
    restore_layers(model)
    assert [name for name, _ in model.named_modules()] == names
    assert not any("forward" in vars(module) for module in model.modules()) and torch.equal(run(), wanted)


def test_a_precomputed_norm_is_taken_for_its_own_input_only_and_once():
    x, other, normed = torch.ones(1), torch.ones(1), torch.zeros(1)
    carry = Carry(x, normed)
    assert carry.take(x) is normed and carry.take(x) is None
    assert Carry(x, normed).take(other) is None
