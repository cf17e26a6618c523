"""Models of Qwen3's shapes with random weights, and random prompts: what speed does not depend on.

torch is imported where a model is made: some benches time a process from its first line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARED = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {**_SHARED, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**_SHARED, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3-8b-3-layers": {
        **_SHARED,
        "num_hidden_layers": 3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "qwen3-8b-8-layers": {
        **_SHARED,
        "num_hidden_layers": 8,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b-8-layers": {
        **_SHARED,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_SHARED,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "tie_word_embeddings": False,
    },
    "70b-16-layers": {
        **_SHARED,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_SHARED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 8192,
    },
}  # fmt: skip


def random_model(name: str, device: str = "cuda") -> "PreTrainedModel":
    """In bf16, the same weights every time, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(0)
    config = (Qwen3MoeConfig if "num_experts" in SHAPES[name] else Qwen3Config)(**SHAPES[name])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_prompts(n: int, length: int, name: str) -> list[list[int]]:
    """The same for the same n."""
    import torch

    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, SHAPES[name]["vocab_size"], (n, length), generator=generator).tolist()
