"""FP8 as its makers write it: read to the same numbers by every command, whatever declares it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe import Recipe
from torch import Tensor

Source = tuple[Path, dict[str, Tensor]]
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCK = (32, 32)


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
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
DIALECTS: dict[str, Dialect] = {
    "DeepSeek": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
        of_blocks,
        "weight_scale_inv",
        (),
    ),
    "DeepSeek, UE8M0": (DEEPSEEK, of_powers, "weight_scale_inv", ()),
    "Mistral": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        of_tensor,
        "weight_scale_inv",
        ("activation_scale",),
    ),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, of_rows, "weight_scale", ("input_scale_ub",)),
    "ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        of_tensor,
        "weight_scale",
        ("input_scale",),
    ),
    "tensor": (compressed_tensors("tensor"), of_tensor, "weight_scale", ("input_scale",)),
    "channel": (compressed_tensors("channel"), of_rows, "weight_scale", ()),
    "block": (compressed_tensors("block", block_structure=list(BLOCK)), of_blocks, "weight_scale", ()),
}
"""Of each: the config's section, its scales, what they are called, and what lies beside them."""


@pytest.fixture(params=DIALECTS)
def source(
    request: pytest.FixtureRequest, random_checkpoint: Any, edit: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in one dialect, and the weights that it means."""
    section, scale_of, scale_name, beside = DIALECTS[request.param]
    folder = random_checkpoint("llama", torch.bfloat16)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight, stem = tensors[name].float(), name.removesuffix("weight")
        scale = scale_of(weight)
        tensors[name] = (weight / spread(scale, weight)).to(torch.float8_e4m3fn)
        tensors[stem + scale_name] = scale.contiguous()
        tensors |= {stem + other: torch.ones(1) for other in beside}
        meant[name] = (tensors[name].float() * spread(scale, weight)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=section)
    return folder, meant


def test_it_is_loaded_to_the_numbers_that_it_means(source: Source) -> None:
    folder, meant = source
    model = load_model(folder, progress=False).model
    loaded = dict(model.named_parameters())
    found = {name: parameter for name, parameter in loaded.items() if name in meant}
    for name, parameter in found.items():
        assert torch.equal(parameter.data, meant[name]), name
    assert "model.layers.1.mlp.down_proj.weight" in found


def test_it_is_described_quantized_and_compared(source: Source, tmp_path: Path) -> None:
    folder, meant = source
    shown = inspect(folder)
    assert sum(summary.modules for summary in shown.formats) == len(meant)
    assert all(summary.format.startswith("FP8") for summary in shown.formats)
    artifact = quantize(folder, Recipe("of fp8", spec=Int4(32)), tmp_path / "out", progress=False)
    assert len(artifact.quantization["modules"]) == len(meant)
    tokens = torch.randint(3, 90, (1, 16))
    with torch.inference_mode():
        before, after = (
            load_model(each, progress=False).model(tokens).logits.float()
            for each in (folder, tmp_path / "out")
        )
    assert 0 < float((after - before).norm() / before.norm()) < 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_the_old_name_of_the_section_is_read(quantized_pair: Any) -> None:
    pair = quantized_pair("llama")
    path = pair.quantized / "config.json"
    config = json.loads(path.read_text())
    config["compression_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    assert open_checkpoint(pair.quantized).quantization_config == config["compression_config"]
    found = CliRunner().invoke(main, ["inspect", str(pair.quantized), "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["convention"] == "compressed-tensors"
