"""Greedy tokens are the best of transformers' own model, for every architecture the engine is promised for.

The best in float64. 32 prompts of ragged lengths, 64 tokens each, in float32: together, alone, and with a
pool so small that requests are preempted, always with prompts cut by the prefill chunk.
"""

import copy

import pytest
import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

pytestmark = pytest.mark.numeric

SIZES = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}

ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "mistral with a sliding window": MistralConfig(**SIZES, sliding_window=24),
    "gemma2": Gemma2Config(**SIZES, **LAYERS, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZES, **LAYERS, query_pre_attn_scalar=16),
    "gpt_oss": GptOssConfig(**SIZES, **EXPERTS, **LAYERS),
    "phi3": Phi3Config(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
}

LENGTHS = (1, 2, 7, 16, 23, 33, 48, 71)
PROMPTS_PER_LENGTH = 4
NEW_TOKENS = 64
Answer = tuple[int, ...]
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def lively_model(config) -> PreTrainedModel:
    """Random weights large enough that outputs neither repeat nor settle."""
    torch.manual_seed(7)
    # A model keeps its configuration, into which an engine writes its attention.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_vector = parameter.ndim == 1
            parameter.normal_(0.0, 0.5 if is_vector else 0.3)
            if is_vector and "norm" in name:
                parameter.add_(1.0)
    return model


def ragged_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist()
        for _ in range(PROMPTS_PER_LENGTH)
        for length in LENGTHS
    ]


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def logits_of(model: PreTrainedModel, prompts: list[list[int]], answers: list[Answer]) -> torch.Tensor:
    """[requests, new tokens, V]: those that each answered token was drawn from, whatever came before it.

    Requests of one length go together: nothing is padded, nothing approximate.
    """
    logits = torch.empty(len(prompts), NEW_TOKENS, SIZES["vocab_size"], dtype=torch.float64)
    for length in {len(prompt) for prompt in prompts}:
        indices = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([[*prompts[index], *answers[index]] for index in indices])
        with torch.inference_mode():
            logits[indices] = model(ids).logits[:, length - 1 : -1].double()
    return logits


def below_the_best(logits: torch.Tensor, answers: list[Answer]) -> float:
    """The most by which a token's logit is below the largest."""
    found = logits.gather(2, torch.tensor(answers).unsqueeze(2)).squeeze(2)
    return float((logits.amax(2) - found).max())


def served(model: PreTrainedModel, prompts: list[list[int]], **sizes) -> tuple[Engine, list[Answer]]:
    engine = Engine(copy.deepcopy(model), EngineOptions(prefill_chunk=40, **sizes), frozenset())
    return engine, [completion.token_ids for completion in engine.generate(prompts, GREEDY)]


# One plain, one with a softcap and norms around blocks, one with experts, sinks and windows.
@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, "gpt_oss"))
def test_tokens_are_the_best_batched_alone_and_preempted(architecture: str):
    model = lively_model(ARCHITECTURES[architecture])
    exact, prompts = in_float64(model), ragged_prompts()
    engine, batched = served(model, prompts, max_num_seqs=32)
    assert max(engine.stats().running_by_step) > 16
    lively = [row for row in batched if len(set(row)) > NEW_TOKENS // 4]
    assert len(lively) > len(prompts) * 3 // 4 and len(set(batched)) == len(prompts), "too dull to prove it"

    # Of two logits that are nearer to each other than float32's error, either may be the larger one on a CPU.
    # The error is transformers' own, here; twice that for the engine's, and twice for there being two logits.
    logits = logits_of(exact, prompts, batched)
    tie = 4 * float((logits_of(model, prompts, batched) - logits).abs().max())
    assert tie < 1e-2
    assert below_the_best(logits, batched) <= tie
    assert below_the_best(logits, batched[1:] + batched[:1]) > 1, "no token is seen to be wrong"

    some = prompts[: len(LENGTHS)]
    alone = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in some]
    assert below_the_best(logits_of(exact, some, alone), alone) <= tie

    engine, preempted = served(model, prompts, max_num_seqs=32, kv_cache_tokens=480, max_model_len=140)
    assert below_the_best(logits_of(exact, prompts, preempted), preempted) <= tie
    assert engine.stats().preemptions > 10
    assert engine.pool.free_pages == engine.pool.num_pages


def test_a_pool_of_whole_contexts_runs_them_all_at_once():
    model, count, prompt, output, page = lively_model(ARCHITECTURES["qwen3"]), 6, 80, 16, 16
    pool = {"kv_cache_tokens": count * (prompt + output), "page_size": page, "max_model_len": prompt + output}
    engine = Engine(model, EngineOptions(max_num_seqs=count, prefill_chunk=40, **pool), frozenset())
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    engine.generate([[3 + index] * prompt for index in range(count)], params)
    assert max(engine.stats().running_by_step) == count and engine.stats().preemptions == 0


def test_the_window_matters_so_ignoring_it_would_be_noticed():
    config = ARCHITECTURES["mistral with a sliding window"]
    model = lively_model(config)
    prompts = ragged_prompts()
    wide = copy.deepcopy(model)
    for layer in wide.model.layers:
        layer.self_attn.config.sliding_window = None
    _, with_window = served(model, prompts, max_num_seqs=32)
    _, without = served(wide, prompts, max_num_seqs=32)
    assert with_window != without
