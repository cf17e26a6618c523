"""Where makers declare that weights are stored below 16 bits: each place is read, or refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.records.recipe import Recipe
from scalegate.tests.pipeline.quantization.tiny_families import make_multimodal, make_text
from scalegate.tests.pipeline.source_forms import FORMS, stored_as

RECIPE = Recipe("again", spec=Int4(32))
Tensors = dict[str, torch.Tensor]


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_tensors(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path, {"format": "pt"})


def without_section(form: str, folder: Path) -> Path:
    stored = stored_as(form, make_text(folder / "plain", "llama"), folder / "stored")
    edit_config(stored, quantization_config=None)
    return stored


def gptq_file(folder: Path) -> Path:
    stored = without_section("GPTQ", folder)
    (stored / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    return stored


def awq_file(folder: Path) -> Path:
    stored = without_section("AWQ", folder)
    section = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (stored / "quant_config.json").write_text(json.dumps(section))
    return stored


def mistral_params(folder: Path) -> Path:
    stored = without_section("Mistral", folder)
    (stored / "params.json").write_text(json.dumps({"quantization": {"qformat_weight": "fp8_e4m3"}}))
    return stored


def text_config(folder: Path) -> Path:
    stored = stored_as("GPTQ", make_multimodal(folder / "plain", "mistral3"), folder / "stored")
    config = json.loads((stored / "config.json").read_text())
    inner = config["text_config"] | {"quantization_config": config["quantization_config"]}
    edit_config(stored, quantization_config=None, text_config=inner)
    return stored


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "quantize_config.json": (gptq_file, "GPTQ, 4 bits, groups of 32"),
    "quant_config.json": (awq_file, "AWQ, 4 bits, groups of 32"),
    "params.json": (mistral_params, "FP8, one scale"),
    "nowhere": (lambda folder: without_section("DeepSeek", folder), "FP8, blocks of 32x32"),
    "text_config": (text_config, "GPTQ, 4 bits, groups of 32"),
}


@pytest.mark.parametrize("place", PLACES)
def test_weights_are_read_wherever_they_are_declared(place: str, tmp_path: Path) -> None:
    make, form = PLACES[place]
    source = make(tmp_path)
    shown = CliRunner().invoke(main, ["inspect", str(source)])
    assert shown.exit_code == 0 and form in shown.output
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in config.get("text_config", {})
    assert not list((tmp_path / "out").glob("quant*_config.json"))
    modules = convention_of(open_checkpoint(source)).modules(open_checkpoint(source))
    opened = open_checkpoint(tmp_path / "out")
    written = convention_of(opened).modules(opened)
    assert modules.keys() >= written.keys() and len(written) >= 14
    for module, weight in written.items():
        meant, found = modules[module].read(), weight.read()
        assert isinstance(meant, torch.Tensor) and not isinstance(found, torch.Tensor)
        error = found.dequantize(torch.float32) - meant.float()
        assert float(error.norm() / meant.float().norm()) < 0.2


def test_fp8_without_scales_is_refused_by_every_command(tmp_path: Path) -> None:
    source = make_text(tmp_path, "llama")
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(source, lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    for command in (["inspect", str(source)], ["quantize", str(source), "--out", str(tmp_path / "out")]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 2
        assert f"{name} is FP8 and has neither {name}_scale_inv nor {name}_scale" in shown.output


def test_layers_of_one_gptq_model_may_differ_in_bits(tmp_path: Path) -> None:
    plain = make_text(tmp_path / "plain", "llama")
    source, module = stored_as("GPTQ", plain, tmp_path / "source"), "model.layers.0.mlp.down_proj"
    weight = load_file(plain / "model.safetensors")[f"{module}.weight"].float()
    wide = {f"{module}.{part}": tensor for part, tensor in FORMS["GPTQ, 8 bits"][1](weight).items()}
    edit_tensors(source, lambda tensors: tensors | wide)
    decoded = open_checkpoint(source).read(f"{module}.weight").float()
    # Half a step of 8 bits, and the rounding of a scale and of a weight to float16.
    step = (weight.amax() - weight.amin()) / 255
    assert float((decoded - weight).abs().max()) <= float(step) + float(weight.abs().max()) * 2**-9


def of_method(method: str, **more: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, quantization_config={"quant_method": method, "bits": 4, **more})


def mlx(folder: Path) -> None:
    section = {"group_size": 64, "bits": 4}
    edit_config(folder, quantization=section, quantization_config=section)


def fp4(folder: Path) -> None:
    of_method("fp8")(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    packed = {
        name: torch.zeros(64, 48, dtype=torch.int8),
        f"{name}_scale_inv": torch.ones(64, 3).to(torch.float8_e8m0fnu),
    }
    edit_tensors(folder, lambda tensors: tensors | packed)


UNREAD: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "auto-round": ("GPTQ", of_method("auto-round"), "declares quant_method 'auto-round'"),
    "hqq, of plain weights": ("", of_method("hqq"), "declares quant_method 'hqq'"),
    "MLX": ("", mlx, "declares quant_method 'mlx'"),
    "Marlin": ("GPTQ", of_method("gptq", checkpoint_format="marlin"), "GPTQ of version .* not 'marlin'"),
    "old Marlin": ("GPTQ", of_method("gptq", is_marlin_format=True), "GPTQ of version .* not 'marlin'"),
    "planar": ("GPTQ", of_method("gptq", format="gptq_p"), "GPTQ of version .* not 'gptq_p'"),
    "GEMV": ("AWQ", of_method("awq", checkpoint_format="gemv"), "AWQ of version `gemm`, not 'gemv'"),
    "a mixture": (
        "ModelOpt",
        of_method("modelopt", quant_algo="MIXED_PRECISION"),
        "quant_algo 'MIXED_PRECISION' is not read",
    ),
    "FP4 beside FP8": ("DeepSeek", fp4, "down_proj.weight is FP4, two codes in a byte"),
}


@pytest.mark.parametrize("form", UNREAD)
def test_what_is_not_read_is_refused_by_its_name(form: str, tmp_path: Path) -> None:
    stored, edit, reason = UNREAD[form]
    source = make_text(tmp_path / "plain", "llama")
    if stored:
        source = stored_as(stored, source, tmp_path / "source")
    edit(source)
    with pytest.raises(UserError, match=reason):
        quantize(source, RECIPE, tmp_path / "out", progress=False)
    shown = CliRunner().invoke(main, ["inspect", str(source)])
    assert shown.exit_code == 2


@pytest.mark.parametrize(
    ("prefix", "architecture", "reason"),
    [
        ("_orig_mod.", "LlamaForCausalLM", "saved from a compiled model"),
        ("module.", "LlamaForCausalLM", r"save `model\.module`"),
        ("base_model.model.", "LlamaForCausalLM", "merge_and_unload"),
        ("other.", "LlamaForSequenceClassification", "it is a LlamaForSequenceClassification"),
        ("other.", "LlamaForCausalLM", "do not belong together"),
    ],
)
def test_names_of_another_program_are_explained(
    prefix: str, architecture: str, reason: str, tmp_path: Path
) -> None:
    source = make_text(tmp_path / "source", "llama")
    edit_tensors(source, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    edit_config(source, architectures=[architecture])
    with pytest.raises(UserError, match=f"nor has the checkpoint model.*{reason}"):
        quantize(source, RECIPE, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("name", "form"), [("params.json", "its maker's own form"), ("model-Q4_K_M.gguf", "GGUF")]
)
def test_a_model_in_another_form_is_called_so(name: str, form: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"it holds a model in .*{form}"):
        open_checkpoint(tmp_path)
