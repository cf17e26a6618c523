"""Layers with a state in the engine: tokens are those of `generate`, in any company and any cut."""

import copy
import functools
import inspect
import logging
import re
import textwrap

import pytest
import torch
import transformers
from packaging.version import Version
from scalegate.base.errors import UserError
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.serving_check.engine import kv_pool, state_layers, state_modules
from scalegate.serving_check.engine.attention import UNSTATED_CONTEXT, context_length, served_layers
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.prepare_model import prepare_model
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.architectures.pretended_gpu import pretended_gpu
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LINEAR = ["linear_attention", "linear_attention", "full_attention"]
DELTA = {
    "layer_types": LINEAR,
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
MIXED = {
    "qwen3_5_text": DELTA,
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention"],
        "num_hidden_layers": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "num_hidden_layers": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 2,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 16,
    },
}
KINDS = tuple(MIXED)
ODD = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "num_hidden_layers": 2},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "block_size": 16,
        "num_local_experts": 2,
    },
    "zaya": {"num_hidden_layers": 2, "num_experts": 2, "moe_intermediate_size": 64, "router_hidden_size": 16},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "mamba_dt_rank": 16,
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
}
if Version(transformers.__version__) >= Version("5.21"):  # Before, its attention is its own.
    ODD["recurrent_gemma"] = {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 32}
"""States alone, states that a forward computes with itself, and attention that layers share."""
MIXED |= ODD
LENGTHS = (1, 3, 21, 50, 70)
NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def config_of(kind: str) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **SIZES | MIXED[kind])


@functools.cache
def source(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.normal_(0.0, 1.3 / parameter.shape[1] ** 0.5)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def expected(kind: str) -> list[tuple[int, ...]]:
    return generated(kind, prompts())


def generated(kind: str, prompts: list[list[int]], tokens: int = NEW_TOKENS) -> list[tuple[int, ...]]:
    """Whole prompts, one by one, with transformers' own states."""
    model = copy.deepcopy(source(kind))
    texts = [torch.tensor([prompt]) for prompt in prompts]
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    with torch.inference_mode():
        answers = [model.generate(text, **limits, eos_token_id=None) for text in texts]
    return [tuple(answer[0, text.shape[1] :].tolist()) for text, answer in zip(texts, answers, strict=True)]


def engine_of(kind: str, **options: int | str) -> Engine:
    given = EngineOptions(**{"device": "cpu", "max_num_seqs": 4, "max_model_len": 128} | options)
    return Engine(copy.deepcopy(source(kind)), given, frozenset())


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts(), GREEDY)]


@pytest.mark.parametrize("kind", MIXED)
def test_tokens_are_those_of_generate_in_a_batch_of_cut_prompts(kind):
    assert answers(engine_of(kind, prefill_chunk=13)) == expected(kind)


@pytest.mark.parametrize("kind", MIXED)
def test_preempted_requests_go_on_as_if_they_had_not_been(kind):
    engine = engine_of(kind, max_model_len=96, kv_cache_tokens=112, page_size=4, prefill_chunk=40)
    assert answers(engine) == expected(kind)
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_of_an_aborted_request_begins_anew(kind):
    engine = engine_of(kind, max_num_seqs=1)
    engine.add_request("aborted", prompts()[4], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort("aborted")
    assert all(slots.slots.any() for slots in engine.pool.states.values())  # else nothing had to be forgotten
    assert answers(engine) == expected(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_state(kind):
    assert answers(engine_of(kind, decode_buckets=(4,))) == expected(kind)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
@pytest.mark.parametrize("mode", ["pin", "per-token"])
def test_bits_do_not_depend_on_company(kind, mode):
    asked = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=3)
    together = engine_of(kind, batch_invariance=mode).generate(prompts(), asked)
    alone = engine_of(kind, batch_invariance=mode)
    for prompt, completion in zip(prompts(), together, strict=True):
        (single,) = alone.generate([prompt], asked)
        assert single == completion


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_bits_do_not_depend_on_cuts_per_token(kind):
    asked = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=3)
    whole, cut = (
        engine_of(kind, batch_invariance="per-token", prefill_chunk=chunk).generate(prompts(), asked)
        for chunk in (128, 7)
    )
    assert whole == cut


def test_batch_invariance_is_refused_on_a_gpu():
    options = EngineOptions(device="cuda", max_model_len=64, batch_invariance="pin")
    with (
        pytest.raises(UserError, match="--batch-invariance pin cannot be kept on a GPU: sums of layers"),
        pretended_gpu(90),
    ):
        prepare_model(copy.deepcopy(source("lfm2")), options)


def test_time_steps_of_prompts_and_answers_have_their_limits():
    model = copy.deepcopy(source("mamba2"))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.05, 0.3)
    options = EngineOptions(device="cpu", max_num_seqs=4, max_model_len=128)
    found = answers(Engine(copy.deepcopy(model), options, frozenset()))
    assert found != expected("mamba2")
    for prompt, answer in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            # transformers limits the steps of prompts alone.
            predicted = model(torch.tensor([[*prompt, *answer]])).logits[0].argmax(1)
        assert tuple(predicted[len(prompt) - 1 : -1].tolist()) == answer


def test_attention_of_a_hybrid_takes_kv_formats():
    unquantized = answers(engine_of("qwen3_5_text"))
    stored = answers(engine_of("qwen3_5_text", kv_cache_dtype="int8_per_token_head"))
    same = sum(ours == theirs for ours, theirs in zip(stored, unquantized, strict=True))
    assert [len(answer) for answer in stored] == [NEW_TOKENS] * len(LENGTHS) and same > 0


def test_without_a_bound_in_the_config_the_context_is_the_one_asked_for_or_a_default(caplog):
    model = copy.deepcopy(source("mamba2"))
    del model.config.max_position_embeddings  # no name of Mamba's config; SIZES gives it to all
    assert context_length(model, 20_000) == 20_000 and not caplog.text
    with caplog.at_level(logging.WARNING):
        assert context_length(model, None) == UNSTATED_CONTEXT
    assert "--max-model-len" in caplog.text


def test_the_pool_counts_states(monkeypatch):
    layers = served_layers(copy.deepcopy(source("qwen3_5_text")))
    # Two layers: four heads of 16 x 16, and 3 inputs of 2 * 2 * 16 + 4 * 16 channels; all float32.
    assert layers.state_bytes == 2 * 4 * (4 * 16 * 16 + 3 * 128)
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 1 << 20)
    form, cpu = KV_FORMATS["unquantized"], torch.device("cpu")

    def pages(state_bytes: int) -> int:
        return kv_pool.pool_pages(layers.attention, form, 16, None, 63, 256, cpu, state_bytes)

    page = form.bytes_per_page(layers.attention[2].shape, 16)
    assert pages(layers.state_bytes) == ((1 << 20) - 64 * layers.state_bytes) // 4 // page < pages(0)


@pytest.mark.parametrize(("kind", "pool"), [("qwen3_5_text", 512), ("qwen3_5_text", None), ("mamba2", None)])
def test_states_without_room_are_refused_with_how_many_requests_fit(monkeypatch, kind, pool):
    layers, cpu = served_layers(copy.deepcopy(source(kind))), torch.device("cpu")
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 8 << 20)

    def pages(max_num_seqs: int) -> int:
        options = EngineOptions(device="cpu", max_num_seqs=max_num_seqs, kv_cache_tokens=pool)
        return kv_pool.pages_asked(layers, options, 256, cpu)

    with pytest.raises(
        UserError, match=r"takes .* GiB of cpu memory, of which the states .* a request"
    ) as said:
        pages(1 << 20)
    most = int(re.search(r"at most (\d+) requests", said.value.message)[1])
    assert pages(most) > 0
    with pytest.raises(UserError, match=f"at most {most} requests"):
        pages(most + 1)


def test_an_unknown_state_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(state_modules.FORWARDS, "MiniMaxLightningAttention")
    model = AutoModelForCausalLM.from_config(config_of("minimax")).eval()
    with pytest.raises(UserError, match="MiniMaxLightningAttention keeps a state of an unknown kind"):
        Engine(model, EngineOptions(device="cpu", max_model_len=64), frozenset())


BEFORE_5_21 = (
    (r"(\w+)\.get_(conv|recurrent)_state\(self\.layer_idx[^)]*\)", r"\1.layers[self.layer_idx].\2_states[0]"),
    (r"(\w+)\.is_recording_past\(self\.layer_idx\)", r"\1.layers[self.layer_idx].record_past"),
    (
        r"\b(cache|cache_params|past_key_values) is not None",
        r"(\g<0> and \1.has_previous_state(self.layer_idx))",
    ),
)
"""How transformers 5.21 and later reads a cache, and how 5.17 to 5.20 read it."""


def read_as_before_5_21(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the forward of a module's class read its cache in the older way."""
    written = inspect.unwrap(type(module).forward)
    text = textwrap.dedent(inspect.getsource(written))
    for newer, older in BEFORE_5_21:
        text = re.sub(newer, older, text)
    made = dict(written.__globals__)
    exec(text, made)
    assert not set(inspect.unwrap(made["forward"]).__code__.co_names) & state_layers.ASKS_FOR_STATES
    monkeypatch.setattr(type(module), "forward", made["forward"])


@pytest.mark.parametrize("kind", exhaustive_but(["qwen3_5_text", "lfm2", "bamba", "zamba"], "qwen3_5_text"))
def test_caches_are_read_in_the_way_of_older_transformers_too(kind, monkeypatch):
    wanted = expected(kind)
    classes = {
        type(module): module for module in source(kind).modules() if state_layers.keeps_a_state(module)
    }
    for module in classes.values():
        read_as_before_5_21(module, monkeypatch)
    assert answers(engine_of(kind, prefill_chunk=13)) == wanted
