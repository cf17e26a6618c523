"""With LongRoPE, a request's tokens depend on its own length, not on the lengths of requests beside it."""

import functools

import pytest
import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig, PreTrainedModel

pytestmark = pytest.mark.numeric

ORIGINAL = 40
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": ORIGINAL,
}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": ORIGINAL,
    "sliding_window": None,
    "pad_token_id": 0,
    "rope_parameters": ROPE,
}
CONFIGS = {
    "phi3": lambda: Phi3Config(**SIZES),
    "phimoe": lambda: PhimoeConfig(
        **SIZES | {"rope_parameters": ROPE | {"short_mscale": 1.1, "long_mscale": 1.3}}, num_local_experts=4
    ),
    "llama": lambda: LlamaConfig(**SIZES),
}
LENGTHS = 3, 25, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 70
"""Of prompts: two outgrow the original context while they are answered, and two are longer from the start."""
NEW_TOKENS = 24
SMALL_POOL = {"kv_cache_tokens": 128}
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def make_model(kind: str, **sizes) -> PreTrainedModel:
    torch.manual_seed(5)
    config = CONFIGS[kind]()
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.4)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def expected(kind: str) -> list[tuple[int, ...]]:
    return tokens_of(make_model(kind))


def tokens_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Greedy tokens of transformers, which computes the whole text again for every token."""
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                ids = torch.tensor([tokens], device=model.device)
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
        found.append(tuple(tokens[len(prompt) :]))
    return found


def answers(kind: str, asked: list[list[int]], **options) -> list[tuple[int, ...]]:
    sizes = {"max_num_seqs": 4, "max_model_len": 128, "prefill_chunk": 12}
    engine = Engine(make_model(kind), EngineOptions(**sizes | options), frozenset())
    found = [completion.token_ids for completion in engine.generate(asked, GREEDY)]
    if "kv_cache_tokens" in options:
        assert engine.scheduler.preemptions > 0
    return found


@pytest.mark.parametrize("options", exhaustive_but([{}, SMALL_POOL, {"batch_invariance": "pin"}], SMALL_POOL))
def test_tokens_are_those_of_transformers(options: dict) -> None:
    assert answers("phi3", prompts(), **options) == expected("phi3")


@pytest.mark.parametrize("kind", exhaustive_but(["phimoe", "llama"], "phimoe"))
def test_other_models_too(kind: str) -> None:
    assert answers(kind, prompts()) == expected(kind)


def test_generate_computes_the_same_for_phi3() -> None:
    model, prompt = make_model("phi3"), prompts()[2]
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
    assert tuple(found[0, len(prompt) :].tolist()) == expected("phi3")[2]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_a_gpu_computes_long_and_short_requests_in_one_step(kind: str, compiled: bool) -> None:
    rope = CONFIGS[kind]().rope_parameters | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "rope_parameters": rope}
    meant = tokens_of(make_model(kind, **sizes).cuda())
    options = EngineOptions(max_num_seqs=4, max_model_len=128, prefill_chunk=16, compiled=compiled)
    engine = Engine(make_model(kind, **sizes).cuda(), options, frozenset())
    engine.warm_up(progress=False)
    both, run = [], engine.runner.run
    engine.runner.run = lambda batch: both.append(len(set(batch.is_long_by_row.values())) == 2) or run(batch)
    assert [completion.token_ids for completion in engine.generate(prompts(), GREEDY)] == meant
    assert any(both) and engine.stats().compilations == ()
