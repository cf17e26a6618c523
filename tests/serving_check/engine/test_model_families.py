"""Tokens are those of transformers' `generate()` for models whose attention needs more than keys and values.

Greedy, in float32 on a CPU, with prompts cut into pieces. One tiny random model for each kind of attention.
"""

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.attention import context_length
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.numeric

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
INDEXER = {"index_topk": 96, "index_head_dim": 16, "index_n_heads": 2}
DSA = LATENT | EXPERTS | GROUPS | INDEXER

FAMILIES = {
    "afmoe": HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1},
    "bloom": {"hidden_size": 48, "num_attention_heads": 3, "tie_word_embeddings": False},
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "deepseek_v32": DSA,
    "diffllama": HEADS,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": HEADS
    | {"layer_types": ["full_attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0}
    | {
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "llama4_text": HEADS
    | {"attention_chunk_size": 16, "floor_scale": 16, "intermediate_size_mlp": 32, "num_local_experts": 4},
    "hrm_text": HEADS | {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 3},
    "nemotron": HEADS,
}
LENGTHS = 3, 21, 50
NEW_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def tiny_model(model_type: str, **changes) -> PreTrainedModel:
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **SIZES | FAMILIES[model_type] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(0.0, 0.25)
    return model


def generated(model: PreTrainedModel, prompt: list[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    return tuple(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str):
    model, generator = tiny_model(family), torch.Generator().manual_seed(9)
    prompts = [torch.randint(3, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    expected = [generated(model, prompt) for prompt in prompts]
    engine = Engine(model, EngineOptions(max_num_seqs=3, max_model_len=96, prefill_chunk=12), frozenset())
    assert [answer.token_ids for answer in engine.generate(prompts, GREEDY)] == expected
    assert any(len(set(answer)) > 3 for answer in expected)


def test_keys_that_hold_their_positions_are_not_rounded():
    model = tiny_model("bloom")
    with pytest.raises(UserError, match=r"ALiBi\), which fp8 would round \(--kv-cache-dtype unquantized"):
        Engine(model, EngineOptions(max_num_seqs=1, max_model_len=96, kv_cache_dtype="fp8"), frozenset())


def test_sparse_attention_is_served_as_long_as_it_is_dense():
    model = tiny_model("deepseek_v32", index_topk=40)
    assert context_length(model, None) == 40
    with pytest.raises(UserError, match=r"past 40 tokens its attention is sparse; requests of at most 40"):
        context_length(model, 41)
    assert context_length(tiny_model("deepseek_v32", index_topk=512), None) == 256
