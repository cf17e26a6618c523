"""The facts that llama.cpp needs about a model besides its weights, from its config: names, sizes, rope.

Only architectures whose tensors the `gguf` package names one for one are supported: dense Llama, Mistral,
Qwen2 and Qwen3.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from gguf import GGUFWriter
from torch import Tensor

from ...base.errors import UserError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""The GGUF architecture for each `model_type` of transformers."""
REQUIRED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
ROPE_THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
"""The kinds of rope that llama.cpp supports, with the parameters that each needs."""


@dataclass(frozen=True)
class Architecture:
    """A model's config in GGUF's keys and names."""

    source: str
    arch: gguf.MODEL_ARCH
    config: Mapping[str, Any]

    @classmethod
    def of(cls, source: str, config: Mapping[str, Any]) -> "Architecture":
        """Return the architecture of a checkpoint. Raise UserError with the reason if llama.cpp would read
        the model differently."""
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise UserError(
                f"{source}: GGUF is written for {', '.join(ARCHITECTURES)}, not for {model_type!r} models"
            )
        missing = [name for name in REQUIRED_FIELDS if not isinstance(config.get(name), int | float)]
        if missing:
            raise UserError(f"{source}: config.json has no number {missing[0]!r}, which GGUF needs")
        rope = _rope(config)
        kind = _rope_type(rope)
        if kind not in ROPES:
            raise UserError(f"{source}: GGUF is written for rope types {', '.join(ROPES)}, not for {kind!r}")
        lacking = [name for name in ROPES[kind] if not isinstance(rope.get(name), int | float)]
        if lacking:
            raise UserError(f"{source}: config.json has no number {lacking[0]!r} in its {kind} rope")
        return cls(source, ARCHITECTURES[model_type], config)

    @property
    def name(self) -> str:
        return gguf.MODEL_ARCH_NAMES[self.arch]

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        return self.config.get("num_key_value_heads") or self.config["num_attention_heads"]

    def tensor_name(self, name: str) -> str:
        """Return GGUF's name of the checkpoint tensor `name`. Raise UserError if GGUF has no name for that
        number.
        """
        names = gguf.get_tensor_name_map(self.arch, self.config["num_hidden_layers"])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"{self.source}: GGUF has no name for the tensor {name} of {self.name} models")
        return found

    def row_order(self, name: str) -> Tensor | None:
        """Return the rows of tensor `name` in llama.cpp's order; None if the order is the same.

        llama.cpp's Llama rotates neighbouring pairs of a head's rows, transformers rotates a head's two
        halves.
        """
        if self.arch is not gguf.MODEL_ARCH.LLAMA:
            return None
        projection = name.split(".")[-2]
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.kv_heads}.get(projection)
        if heads is None:
            return None
        rows = torch.arange(heads * self.head_dim).view(heads, 2, self.head_dim // 2)
        return rows.transpose(1, 2).reshape(-1)

    def write_metadata(self, writer: GGUFWriter, name: str) -> None:
        config = self.config
        writer.add_name(name)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self._rope_theta)
        rope = _rope(config)
        if _rope_type(rope) in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(_rope_type(rope)))
            writer.add_rope_scaling_factor(float(rope["factor"]))
        if _rope_type(rope) == "yarn":
            writer.add_rope_scaling_orig_ctx_len(int(rope[ORIGINAL]))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])

    @property
    def _rope_theta(self) -> float:
        return float(_rope(self.config).get("rope_theta") or ROPE_THETA)

    def rope_factors(self) -> Tensor | None:
        """Return the divisors of llama3's rope for each frequency, fp32 [head_dim / 2]; None for other kinds.

        llama.cpp has no name for this rope, and reads the factors as a tensor.
        """
        rope = _rope(self.config)
        if _rope_type(rope) != "llama3":
            return None
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        turns = rope[ORIGINAL] * self._rope_theta**-exponents / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope section; older configs have its keys at the top."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta")} | section
