"""A third of the model families: each is quantized, and its source and its artifact are served.

The greedy tokens are those of transformers' `generate()` in float32: of the source with its weights as they
are, of the artifact with its weights dequantized. One tiny random checkpoint for each family.
`tests/bench/engine/families.py` does the same with checkpoints given to it, and records the outcomes.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.tests.bench.engine.families import EQUAL, dequantized, quantized, served
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.pipeline.quantization.tiny_families import MULTIMODAL, make_multimodal
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = [pytest.mark.numeric, pytest.mark.long]

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "index_topk": 128, "index_head_dim": 16, "index_n_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "ffn_dim": 96, "word_embed_proj_dim": 64,
}  # fmt: skip
"""Of these, each family takes the fields that its config has."""
LATENT = {"num_key_value_heads": 4}
SLIDING = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
LINEAR = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
NARROW = {"intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 60,
}  # fmt: skip
"""The longest request outgrows the original context."""
TEXT: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "bamba": MAMBA | {"attn_layer_indices": [3]},
    "bloom": {"n_layer": 4, "n_head": 4},
    "cohere2": SLIDING,
    "cohere2_moe": SLIDING | NARROW,
    "deepseek_v2": LATENT | {"head_dim": None},
    "deepseek_v3": LATENT | {"rope_parameters": YARN},
    "deepseek_v32": LATENT,
    "diffllama": {},
    "exaone4": SLIDING | {"sliding_window_pattern": 4},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 16},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neox": {},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granite": {},
    "granitemoe": NARROW,
    "hunyuan_v1_moe": NARROW | {"moe_topk": 2},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 16,
    },
    "kimi_linear": LATENT | LINEAR | {"linear_head_dim": 16, "linear_num_heads": 4, "q_lora_rank": None},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "llama": {"rope_parameters": LLAMA3},
    "llama4_text": NARROW | {"attention_chunk_size": 16, "floor_scale": 16, "intermediate_size_mlp": 96},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "minicpm3": LATENT,
    "minimax": NARROW
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "sliding_window": None, "block_size": 16},
    "minimax_m2": NARROW,
    "mixtral": {"sliding_window": None},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 256},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "olmoe": NARROW,
    "opt": {},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 60, "rope_parameters": LONGROPE},
    "phimoe": {"sliding_window": None},
    "qwen3": {},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 32},
    "smollm3": {"sliding_window": None},
    "starcoder2": {},
}  # fmt: skip
LENGTHS = 3, 21, 50
KEPT = ("A_log", "conv", "time_", "slope_rate", "_decay")
"""Parts of the names of parameters that have to fit each other, or that keep states from growing."""


def make(folder: Path, family: str) -> Path:
    torch.manual_seed(3)
    if family in MULTIMODAL:
        text = MULTIMODAL[family]["text_config"] | {"max_position_embeddings": 256}
        make_multimodal(folder, family, text_config=text)
    else:
        kind = CONFIG_MAPPING[family]
        known = {field.name for field in dataclasses.fields(kind)}
        sizes = {name: size for name, size in SIZES.items() if name in known}
        config = kind(**sizes | TEXT[family])
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name: livened(name, t) for name, t in load_file(path).items()}, path, {"format": "pt"})
    return folder


def livened(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that make the next token depend on the ones before; decays of states stay as they are."""
    is_matrix = tensor.dim() in (2, 3) and not any(part in name for part in KEPT)
    return torch.randn_like(tensor) * (1.3 / tensor.shape[-1] ** 0.5) if is_matrix else tensor


@pytest.mark.parametrize("family", exhaustive_but([*TEXT, *MULTIMODAL], "bamba"))
def test_source_and_artifact_answer_as_transformers_does(family: str, tmp_path: Path):
    source, artifact = make(tmp_path / "source", family), tmp_path / "artifact"
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 110, (length,), generator=generator).tolist() for length in LENGTHS]
    assert quantized(source, artifact) == "quantized"
    assert served(source, source, prompts) == EQUAL
    plain = dequantized(source, artifact, tmp_path / "plain")
    assert served(artifact, plain, prompts) == EQUAL
    assert served(artifact, source, prompts) != EQUAL
