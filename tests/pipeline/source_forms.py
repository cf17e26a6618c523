"""The forms below 16 bits that sources are published in: a checkpoint's weights, stored as each has them.

Written weight by weight where the project's own code is tested against it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCK = (32, 32)
GROUP = 32


def compressed_tensors(strategy: str, **more: Any) -> dict[str, Any]:
    weights = FLOAT | {"strategy": strategy} | more
    group = {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def of_tensor(weight: Tensor) -> Tensor:
    return (weight.abs().amax() / 448).reshape(1)


def of_rows(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def of_blocks(weight: Tensor) -> Tensor:
    n, k = weight.shape
    blocks = weight.abs().unflatten(0, (n // 32, 32)).unflatten(2, (k // 32, 32))
    return blocks.amax((1, 3)) / 448


def of_powers(weight: Tensor) -> Tensor:
    """E8M0: powers of two alone."""
    return of_blocks(weight).log2().ceil().exp2().to(torch.float8_e8m0fnu)


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    scale = scale.float()
    if scale.numel() == 1 or scale.shape[1] == 1:
        return scale.expand(weight.shape) if scale.dim() == 2 else scale
    return scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


Dialect = tuple[dict[str, Any], Callable[[Tensor], Tensor], str, tuple[str, ...]]
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
MISTRAL = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
DIALECTS: dict[str, Dialect] = {
    "DeepSeek": (DEEPSEEK, of_blocks, "weight_scale_inv", ()),
    "DeepSeek, UE8M0": (DEEPSEEK, of_powers, "weight_scale_inv", ()),
    "Mistral": (MISTRAL, of_tensor, "weight_scale_inv", ("activation_scale",)),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, of_rows, "weight_scale", ("input_scale_ub",)),
    "ModelOpt": (MODELOPT, of_tensor, "weight_scale", ("input_scale",)),
    "tensor": (compressed_tensors("tensor"), of_tensor, "weight_scale", ("input_scale",)),
    "channel": (compressed_tensors("channel"), of_rows, "weight_scale", ()),
    "block": (compressed_tensors("block", block_structure=list(BLOCK)), of_blocks, "weight_scale", ()),
}
"""Of each: the config's section, its scales, what they are called, and what lies beside them."""


def packed_along(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes to int32 words along `dim`, the first in the lowest bits; one at a time."""
    per_word = 32 // bits
    moved = codes.movedim(dim, 0)
    words = torch.zeros(moved.shape[0] // per_word, *moved.shape[1:], dtype=torch.int64)
    for index in range(moved.shape[0]):
        words[index // per_word] |= moved[index].long() << (bits * (index % per_word))
    return words.to(torch.uint32).view(torch.int32).movedim(0, dim).contiguous()


def gptq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, bits: int, offset: int):
    return {
        "qweight": packed_along(codes, bits, 0),
        "qzeros": packed_along(zeros - offset, bits, 1),
        "scales": scales,
        "g_idx": groups.int(),
    }


def awq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """AWQ puts column `order[i]` of every eight into nibble i."""
    places = torch.arange(codes.shape[1]).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    return {
        "qweight": packed_along(codes[:, places], 4, 1),
        "qzeros": packed_along(zeros[:, places], 4, 1),
        "scales": scales,
    }


NF4 = torch.linspace(-1, 1, 16)
"""Any sixteen values: the checkpoint brings its own."""


def nf4_state(n: int, k: int, **more: Any) -> dict[str, Any]:
    return {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k], **more}


def nf4_tensors(codes: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "weight": (codes[0::2] << 4 | codes[1::2]).view(-1, 1),
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": text,
    }


def _float8(dialect: str) -> Callable[[Tensor], dict[str, Tensor]]:
    _, scale_of, scale_name, beside = DIALECTS[dialect]

    def stored(weight: Tensor) -> dict[str, Tensor]:
        scale = scale_of(weight)
        codes = (weight / spread(scale, weight)).to(torch.float8_e4m3fn)
        return {"weight": codes, scale_name: scale.contiguous()} | {name: torch.ones(1) for name in beside}

    return stored


def _integers(method: str, bits: int) -> Callable[[Tensor], dict[str, Tensor]]:
    def stored(weight: Tensor) -> dict[str, Tensor]:
        n, k = weight.shape
        columns, groups, top = weight.T, torch.arange(k) // GROUP, (1 << bits) - 1
        blocks = columns.reshape(k // GROUP, GROUP, n)
        low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-6).half()
        zeros = (-low / scales.float()).round().clamp(1, top).long()
        codes = (columns / scales.float()[groups] + zeros[groups]).round().clamp(0, top).long()
        if method == "awq":
            return awq_tensors(codes, zeros, scales)
        return gptq_tensors(codes, zeros, scales, groups, bits, 1)

    return stored


def _nf4(weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.view(-1, 64)
    largest = blocks.abs().amax(1)
    distances = ((blocks / largest.unsqueeze(1)).unsqueeze(-1) - NF4).abs()
    codes = distances.argmin(-1).to(torch.uint8).flatten()
    return nf4_tensors(codes, nf4_state(*weight.shape)) | {"weight.absmax": largest}


def _int8(weight: Tensor) -> dict[str, Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest.unsqueeze(1) * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}


FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    **{name: (dialect[0], _float8(name)) for name, dialect in DIALECTS.items()},
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, _integers("gptq", 4)),
    "GPTQ, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, _integers("gptq", 8)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, _integers("awq", 4)),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "bitsandbytes, 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
}
"""Of each: the config's section, and a weight's tensors by what follows its layer's name."""


def stored_as(form: str, checkpoint: Path, folder: Path) -> Path:
    """A copy of `checkpoint` in `folder` with its projections in that form."""
    section, stored = FORMS[form]
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stem = name.removesuffix("weight")
        tensors |= {stem + part: tensor for part, tensor in stored(tensors.pop(name).float()).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder
