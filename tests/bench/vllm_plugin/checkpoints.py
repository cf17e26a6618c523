"""Checkpoints of Qwen3's shapes with random quantized weights, in the conventions that vLLM reads.

    int4-sym int4-zp int4-g32   compressed-tensors, groups of 128 and 32
    gptq awq int8 nvfp4         nvfp4: with 16-bit activations

Made on the GPU and written layer by layer; what they say is noise, but all of it is there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scalegate.tests.bench.random_qwen3 import SHAPES
from torch import Tensor

Tensors = dict[str, Tensor]
STD = 0.02
"""Of weights, as transformers initializes them."""
CODE_STD = 16 / 12**0.5
"""Of uniform four-bit codes; of eight-bit ones it is 16 times that."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns AutoAWQ puts into nibble 0, 1, … of a word."""


@dataclass(frozen=True)
class Convention:
    """quantization: the config's section; tensors: of one linear layer [n, k]."""

    quantization: dict[str, Any]
    tensors: Callable[[int, int], Tensors]


def compressed_tensors(fmt: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed",
        "kv_cache_scheme": None, "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def integers(bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return compressed_tensors(
        "pack-quantized", weights | {"group_size": group_size, "dynamic": False, "observer": "minmax"}
    )


def words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64, device="cuda").to(torch.int32)


def scales(n: int, k: int, group_size: int, bits: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    std = CODE_STD * (16 if bits == 8 else 1)
    return torch.rand(n, k // group_size, device="cuda").add(0.5).mul(STD / std).to(dtype)


def middling_zeros(rows: int, columns: int) -> Tensor:
    """Words of eight zero points of 6 to 9 each."""
    each = torch.randint(6, 10, (rows, columns, 8), device="cuda", dtype=torch.int64)
    packed = (each << (4 * torch.arange(8, device="cuda"))).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def packed_integers(bits: int, group_size: int, symmetric: bool) -> Callable[[int, int], Tensors]:
    def made(n: int, k: int) -> Tensors:
        found = {
            "weight_packed": words(n, k * bits // 32),
            "weight_scale": scales(n, k, group_size, bits),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            found["weight_zero_point"] = middling_zeros(n // 8, k // group_size)
        return found

    return made


def gptq_tensors(n: int, k: int) -> Tensors:
    return {
        "qweight": words(k // 8, n),
        "scales": scales(n, k, 128, dtype=torch.float16).t().contiguous(),
        "qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32, device="cuda"),
        "g_idx": torch.arange(k, dtype=torch.int32) // 128,
    }


def awq_tensors(n: int, k: int) -> Tensors:
    return {
        "qweight": words(k, n // 8),
        "scales": scales(n, k, 128, dtype=torch.float16).t().contiguous(),
        "qzeros": middling_zeros(k // 128, n // 8),
    }


def nvfp4_tensors(n: int, k: int) -> Tensors:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.rand(n, k // 16, device="cuda").mul(200).add(100).to(torch.float8_e4m3fn)
    # A divisor: E2M1's codes have a standard deviation of 3, the scales a mean of 200.
    return {
        "weight_packed": codes,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([200 * 3 / STD]),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AWQ["modules_to_not_convert"] = ["lm_head"]
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
CONVENTIONS = {
    "int4-sym": Convention(integers(4, 128, True), packed_integers(4, 128, True)),
    "int4-zp": Convention(integers(4, 128, False), packed_integers(4, 128, False)),
    "int4-g32": Convention(integers(4, 32, True), packed_integers(4, 32, True)),
    "int8": Convention(integers(8, 128, True), packed_integers(8, 128, True)),
    "gptq": Convention(GPTQ | {"lm_head": False}, gptq_tensors),
    "awq": Convention(AWQ, awq_tensors),
    "nvfp4": Convention(
        compressed_tensors("nvfp4-pack-quantized", NVFP4 | {"dynamic": False, "observer": "minmax"}),
        nvfp4_tensors,
    ),
}


PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantized(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """The weight [n, k] that a layer in INT4 or NVFP4 of compressed-tensors stands for."""
    packed, scale = tensors["weight_packed"], tensors["weight_scale"].to(dtype)
    bits = torch.arange(0, 8 * packed.itemsize, 4, device=packed.device, dtype=packed.dtype)
    codes = (packed[..., None] >> bits & 15).flatten(1).long()
    if "weight_global_scale" in tensors:
        values = torch.tensor(E2M1, dtype=dtype, device=packed.device)[codes]
        scale = scale / tensors["weight_global_scale"].to(scale)
    elif (zeros := tensors.get("weight_zero_point")) is not None:
        zeros = (zeros[:, None] >> bits[:, None] & 15).flatten(0, 1)
        values = (codes - zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], 1)).to(dtype)
    else:
        values = (codes - 8).to(dtype)
    return values * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def float32_model(folder: Path, device: str = "cuda") -> Any:
    """The dense model of a checkpoint in transformers, with the weights that it stands for."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, Qwen3Config

    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    config = Qwen3Config(**fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = dict(model.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device=device) as file:
            found = {name: file.get_tensor(name) for name in list(file.keys())}
        for name in found:
            layer, _, part = name.rpartition(".")
            if name in names:
                names.pop(name).data.copy_(found[name])
            elif part == "weight_packed":
                parts = {key: found.get(f"{layer}.{key}") for key in PARTS}
                weight = dequantized({key: t for key, t in parts.items() if t is not None}, torch.float32)
                names.pop(f"{layer}.weight").data.copy_(weight)
    if names:
        raise SystemExit(f"{folder.name}: no weights for {', '.join(names)}")
    return model


def write_checkpoint(
    folder: Path, shape: str, convention: str, dtype: str, layers: int | None = None
) -> None:
    """A checkpoint of `random_qwen3.SHAPES`, cut to so many layers; nothing if it is there already."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    made = CONVENTIONS[convention]
    fields = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    kind_of_model = (
        ("Qwen3MoeForCausalLM", "qwen3_moe") if "num_experts" in fields else ("Qwen3ForCausalLM", "qwen3")
    )
    config = {"architectures": [kind_of_model[0]], "model_type": kind_of_model[1], "torch_dtype": dtype}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False}
    config |= {**fields, "quantization_config": made.quantization}
    index: dict[str, str] = {}
    kind = getattr(torch, dtype)

    def save(name: str, tensors: Tensors) -> None:
        plain = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        save_file(plain, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(plain, name))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=kind) * STD

    hidden = fields["hidden_size"]
    save("ends.safetensors", {
        "model.embed_tokens.weight": normal(fields["vocab_size"], hidden),
        "lm_head.weight": normal(fields["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=kind),
    })  # fmt: skip
    for layer in range(fields["num_hidden_layers"]):
        save(f"layer-{layer}.safetensors", layer_tensors(layer, fields, made, kind))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def layer_tensors(layer: int, fields: dict[str, Any], made: Convention, dtype: torch.dtype) -> Tensors:
    hidden, inner, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    linear = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
    }  # fmt: skip
    experts = fields.get("num_experts")
    inner = fields["moe_intermediate_size"] if experts else inner
    for mlp in [f"mlp.experts.{expert}" for expert in range(experts)] if experts else ["mlp"]:
        linear |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        linear[f"{mlp}.down_proj"] = hidden, inner
    found = {
        f"{name}.{key}": tensor
        for name, shape in linear.items()
        for key, tensor in made.tensors(*shape).items()
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    found |= {f"{name}.weight": torch.ones(size, dtype=dtype) for name, size in norms.items()}
    if experts:
        found["mlp.gate.weight"] = torch.randn(experts, hidden, device="cuda", dtype=dtype) * STD
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in found.items()}
