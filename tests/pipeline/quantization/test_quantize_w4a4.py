"""NVFP4 inputs as well as weights: scales found on a text, layer by layer, written, read and served."""

import json
from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.model_loader import layer_stream
from scalegate.pipeline.model_loader.linear_weights import LinearWeight, find_linear_weights
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization import job_calibration
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.quantization.calibration.calibration import calibrate
from scalegate.pipeline.quantization.calibration.calibration_needs import CalibrationNeeds
from scalegate.pipeline.quantization.shards.weight_tensors import WeightQuantizer
from scalegate.pipeline.records.recipe import Recipe, Rule
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

RECIPE = Recipe("w4a4", spec=NVFP4(activations=True))
EXPORTS = ("compressed-tensors", "modelopt")
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 6)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    monkeypatch.setattr(layer_stream, "SEQUENCES_AT_ONCE", 4)


def linears_of(folder: Path) -> list[LinearWeight]:
    found = find_linear_weights(open_checkpoint(folder)).linears
    return [linear for group in found.values() for linear in group if linear.role == "linear"]


def largest_inputs(folder: Path, linears: list[LinearWeight], sequences: torch.Tensor) -> dict[str, float]:
    wanted = CalibrationNeeds(largest=frozenset(linear.module for linear in linears))
    quantizer = WeightQuantizer(torch.bfloat16, torch.device("cpu"))
    return calibrate(open_checkpoint(folder), linears, wanted, sequences, quantizer, {}, None, False).largest


def observed(folder: Path, sequences: torch.Tensor) -> dict[str, float]:
    """The same by transformers alone: the whole model in memory, a hook on every layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    largest: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: largest.update(
                    {name: max(largest.get(name, 0.0), float(args[0].abs().amax()))}
                )
            )
    with torch.inference_mode():
        for row in sequences.split(4):
            model(row)
    return largest


def test_layer_by_layer_finds_what_the_whole_model_shows(example_checkpoint: Path) -> None:
    sequences = torch.randint(0, 8192, (6, 64), generator=torch.Generator().manual_seed(0))
    linears = linears_of(example_checkpoint)
    found = largest_inputs(example_checkpoint, linears, sequences)
    expected = observed(example_checkpoint, sequences)
    assert found == {linear.module: expected[linear.module] for linear in linears}


def test_every_expert_s_inputs_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=32)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    linears = linears_of(tmp_path)
    sequences = torch.randint(0, 64, (5, 32))
    found = largest_inputs(tmp_path, linears, sequences)
    assert found.keys() == {linear.module for linear in linears}
    experts = [f"model.layers.1.mlp.experts.{i}" for i in range(4)]
    assert all(found[f"{expert}.gate_proj"] == found[f"{expert}.up_proj"] for expert in experts)
    assert len({found[f"{expert}.down_proj"] for expert in experts}) == 4
    # One token reaches two experts; the others get what their neighbours have.
    single = largest_inputs(tmp_path, linears, sequences[:1, :1])
    assert len({single[f"{name}.down_proj"] for name in experts}) == 2


@pytest.mark.parametrize("export", EXPORTS)
def test_scales_are_written_read_and_served(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path, export: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = {"export": export, "calibration": heldout_text, "progress": False}
    artifact = quantize(example_checkpoint, RECIPE, out, **options)
    assert "fast on Blackwell only" in artifact.quantization["formats"][0]["label"]
    checkpoint = open_checkpoint(out)
    stored = convention_of(checkpoint).modules(checkpoint)
    inputs = {name: weight.read_input() for name, weight in stored.items() if weight.read_input is not None}
    assert len(inputs) == len(stored) == 28
    for input_format in inputs.values():
        assert isinstance(input_format, NVFP4Input)
        assert float(input_format.global_scale.log2() % 1) == 0
    multiplier = float(inputs[GATE].global_scale) ** (-1 if inputs[GATE].divides else 1)
    assert 1e-4 < multiplier < 1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["input_activations"]["num_bits"] == 4
    if export == "modelopt":
        assert config["quant_algo"] == "NVFP4"
    loaded = load_model(out, progress=False).model
    rounding = [module for module in loaded.modules() if getattr(module, "input_format", None) is not None]
    assert len(set(rounding)) == 28 * 4 // 7, "layers that share an input share its scale, and are merged"
    plain = load_model(example_checkpoint, progress=False).model
    tokens = torch.randint(0, 8192, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = plain(tokens).logits.float(), loaded(tokens).logits.float()
    assert 0.05 < float((found - expected).norm() / expected.norm()) < 0.5
    # The text is read once.
    monkeypatch.setattr(job_calibration, "calibrate", None)
    quantize(example_checkpoint, RECIPE, out, **options)


def test_what_cannot_be_calibrated_on_or_written_is_refused(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UserError, match="calibration needs at least 64"):
        quantize(example_checkpoint, RECIPE, tmp_path / "out", calibration=tmp_path / "short.txt")
    with pytest.raises(UserError, match="cannot read the calibration text"):
        quantize(example_checkpoint, RECIPE, tmp_path / "out", calibration=tmp_path / "none.txt")
    some = Recipe("some", spec=NVFP4(activations=True), rules=(Rule("*.o_proj", NVFP4()),))
    with pytest.raises(UserError, match="one algorithm for all layers"):
        quantize(example_checkpoint, some, tmp_path / "o", export="modelopt", calibration=heldout_text)
    with pytest.raises(UserError, match="written with weights alone"):
        quantize(example_checkpoint, RECIPE, tmp_path / "o", export="torchao", calibration=heldout_text)


def test_inputs_of_some_layers_only(example_checkpoint: Path, heldout_text: Path, tmp_path: Path) -> None:
    some = Recipe("some", spec=NVFP4(activations=True), rules=(Rule("*.o_proj", NVFP4()),))
    quantize(example_checkpoint, some, tmp_path / "out", calibration=heldout_text, progress=False)
    checkpoint = open_checkpoint(tmp_path / "out")
    stored = convention_of(checkpoint).modules(checkpoint)
    rounded = {name for name, weight in stored.items() if weight.read_input is not None}
    assert rounded == {name for name in stored if not name.endswith("o_proj")}
