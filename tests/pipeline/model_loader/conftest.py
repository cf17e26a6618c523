"""Tiny random checkpoints of many architectures, and INT4 copies of them with a dequantized twin."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SPECIFIC: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "llama": {},
    "phi3": {},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"head_dim": 16, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **MLA,
    },
}


@pytest.fixture
def random_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`random_checkpoint(model_type, dtype)`: a two-layer random checkpoint, as transformers saves it."""

    def make(model_type: str, dtype: torch.dtype = torch.float32) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **(COMMON | SPECIFIC[model_type]))
        folder = tmp_path / f"{model_type}-{dtype}".replace("torch.", "")
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        return folder

    return make


@dataclass(frozen=True)
class QuantizedPair:
    """An INT4 checkpoint and a plain one that holds the same numbers, dequantized."""

    quantized: Path
    dequantized: Path
    specs: dict[str, Int4]


@pytest.fixture
def quantized_pair(random_checkpoint: Callable[..., Path]) -> Callable[..., QuantizedPair]:
    """`quantized_pair(model_type, symmetric, group_size_of)`: projections quantized, experts one by one."""

    def make(
        model_type: str,
        symmetric: bool = True,
        group_size_of: Callable[[str], int] = lambda module: 32,
        export: str = "compressed-tensors",
    ) -> QuantizedPair:
        source = random_checkpoint(model_type)
        convention = EXPORTS[export]
        tensors, twin, specs, shapes = {}, {}, {}, {}
        for name, tensor in load_file(source / "model.safetensors").items():
            parts = _linear_weights(name, tensor)
            dequantized = []
            for module, weight in parts.items():
                packed = minmax(weight, group_size_of(module), symmetric)
                tensors.update(convention.tensors(module, packed))
                specs[module], shapes[module] = packed.spec, packed.shape
                dequantized.append(packed.dequantize(torch.float32))
            if not parts:
                tensors[name] = tensor
            fused = tensor.ndim == 3
            stacked = [w.T for w in dequantized] if fused else dequantized
            twin[name] = torch.stack(stacked).contiguous() if fused else (*stacked, tensor)[0]
        plain = [name for name in tensors if name in twin]
        pair = QuantizedPair(source.with_name("quantized"), source.with_name("dequantized"), specs)
        for folder, content in ((pair.quantized, tensors), (pair.dequantized, twin)):
            shutil.copytree(source, folder)
            save_file(content, folder / "model.safetensors", convention.file_metadata(specs, shapes, plain))
        edit_config(
            pair.quantized,
            quantization_config=convention.quantization_config(specs, ["lm_head"]),
        )
        return pair

    return make


def _linear_weights(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The [N, K] weights to quantize in this tensor, by module; a fused 3-D one gives one for each expert."""
    if tensor.ndim == 3:
        parent, _, leaf = name.rpartition(".")
        return {f"{parent}.{i}.{leaf}": expert.T.contiguous() for i, expert in enumerate(tensor)}
    is_projection = "_proj" in name or ".experts." in name
    return (
        {name.removesuffix(".weight"): tensor}
        if is_projection and tensor.ndim == 2 and name.endswith(".weight")
        else {}
    )


def minmax(weight: torch.Tensor, group_size: int, symmetric: bool) -> Int4Weight:
    """Round-to-nearest INT4: the plainest quantizer, since only writing and reading are at test."""
    n, k = weight.shape
    spec = Int4(k if group_size == -1 else group_size, symmetric)
    groups = weight.float().view(n, -1, spec.group_size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (groups.abs().amax(-1) / 7 if symmetric else (high - low) / 15).to(torch.bfloat16)
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    packed = pack_nibbles(codes.to(torch.uint8).view(n, k))
    return Int4Weight(spec, packed, scale, zero.to(torch.uint8))


@pytest.fixture
def edit() -> Callable[..., None]:
    return edit_config


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
