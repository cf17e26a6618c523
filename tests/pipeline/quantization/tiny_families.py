"""Tiny random checkpoints of multimodal families and of some whose names differ from transformers' own."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOKENS = {"image_token_id": 120, "image_token_index": 120, "video_token_id": 121}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"model_type": "qwen2_5_vl_text", "rope_parameters": ROPE},
        "vision_config": QWEN_TOWER,
    },
}
"""By model type; transformers has a class for text for none but the first."""
TEXT_ONLY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {"layer_types": ["full_attention"] * 2},
    "nanochat": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 1,
        "mamba_dt_rank": 8,
    },
}


def make_multimodal(folder: Path, model_type: str, **changes: Any) -> Path:
    """A checkpoint with its towers, as transformers saves it."""
    config = AutoConfig.for_model(model_type, **(TOKENS | MULTIMODAL[model_type] | changes))
    return _save(AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16), folder)


def make_text(folder: Path, model_type: str, **changes: Any) -> Path:
    config = AutoConfig.for_model(model_type, **(TEXT | TEXT_ONLY[model_type] | changes))
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def _save(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.1)
    model.save_pretrained(folder)
    return folder


def add_prediction_head(folder: Path, prefix: str = "mtp.layers.0") -> Path:
    """The last of two decoder layers once more, under another name, and the projection before it."""
    path, layer = folder / "model.safetensors", "model.layers.1."
    tensors = load_file(path)
    head = {n.replace(layer, f"{prefix}."): t.clone() for n, t in tensors.items() if n.startswith(layer)}
    head[f"{prefix}.eh_proj.weight"] = torch.randn(64, 128, dtype=torch.bfloat16)
    save_file(tensors | head, path, {"format": "pt"})
    return folder
