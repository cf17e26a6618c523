"""NVFP4 artifacts: one global scale where weights are merged, read back bit for bit, resumed on the way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.nvfp4_least_squares import quantize_nvfp4
from scalegate.pipeline.quantization.shards import shared_tensors
from scalegate.pipeline.quantization.shards.weight_tensors import WeightQuantizer
from scalegate.pipeline.quantization.shards.work_record import FINISHED_SUFFIX, MEASURED_SUFFIX, PARTS_FOLDER
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.pipeline.records.recipe_file import load_recipe
from transformers import AutoConfig, AutoModelForCausalLM

LAYER = "model.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{name}_proj" for name in "qkv"]
EXPORTS = ("compressed-tensors", "modelopt", "torchao")
HOLD_EXPERTS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module")
def louder(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint with one K projection 40 times as large, so that its siblings would differ."""
    folder = Path(shutil.copytree(example_checkpoint, tmp_path_factory.mktemp("louder") / "source"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{ATTENTION[1]}.weight"] *= 40
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=EXPORTS)
def artifact(louder: Path, tmp_path_factory: pytest.TempPathFactory, request) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "out"
    quantize(louder, "nvfp4", folder, export=request.param, progress=False)
    return folder


def stored(folder: Path) -> dict:
    checkpoint = open_checkpoint(folder)
    return {name: weight.read() for name, weight in convention_of(checkpoint).modules(checkpoint).items()}


def test_weights_come_back_as_the_solver_made_them(artifact: Path, louder: Path) -> None:
    weights, source = stored(artifact), open_checkpoint(louder)
    assert len(weights) == 28
    for module in (*ATTENTION, f"{LAYER}.mlp.down_proj"):
        weight = weights[module]
        expected = quantize_nvfp4(source.read(f"{module}.weight"), NVFP4(), weight.global_scale).weight
        assert torch.equal(weight.codes, expected.codes)
        assert torch.equal(weight.scale.view(torch.uint8), expected.scale.view(torch.uint8))
    assert Artifact.read(artifact).quantization["bits_per_weight"] == pytest.approx(4.5, abs=0.001)


def test_merged_weights_share_their_global_scale_and_are_served_as_one(artifact: Path) -> None:
    weights = stored(artifact)
    scales = {module: float(weight.global_scale) for module, weight in weights.items()}
    assert len({scales[module] for module in ATTENTION}) == 1
    assert scales[f"{LAYER}.mlp.gate_proj"] == scales[f"{LAYER}.mlp.up_proj"]
    others = [module.replace("layers.0", "layers.1") for module in ATTENTION]
    assert scales[ATTENTION[0]] > 8 * scales[others[0]]
    loaded = load_model(artifact, progress=False)
    assert len(loaded.layouts) == 4 * 4


def test_modelopt_s_sidecar_says_what_the_config_says(louder: Path, tmp_path: Path) -> None:
    recipe = Recipe("some", spec=NVFP4(), rules=(Rule("*.layers.1.*", Unquantized()),))
    quantize(louder, recipe, tmp_path / "out", export="modelopt", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sidecar = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert sidecar["quantization"]["quant_algo"] == config["quant_algo"] == "W4A16_NVFP4"
    assert sidecar["quantization"]["exclude_modules"] == config["ignore"]
    assert "model.layers.1.mlp.up_proj" in config["ignore"] and "lm_head" in config["ignore"]
    assert "hf_quant_config.json" in Artifact.read(tmp_path / "out").files
    # Engines look at either file alone.
    (tmp_path / "out" / "config.json").write_text(json.dumps(open_checkpoint(louder).config))
    assert len(stored(tmp_path / "out")) == 21


def test_formats_mix_by_rule_and_scales_are_shared_within_a_format(louder: Path, tmp_path: Path) -> None:
    rules = (
        Rule("*.layers.0.self_attn.k_proj", Int4(64)),
        Rule("*.down_proj", Int4(128)),
        Rule("*.o_proj", Unquantized()),
    )
    quantize(louder, Recipe("mix", spec=NVFP4(), rules=rules), tmp_path / "out", progress=False)
    weights = stored(tmp_path / "out")
    assert weights[ATTENTION[1]].spec == Int4(64) and len(weights) == 24
    # The loud projection is no NVFP4, so it does not count.
    assert float(weights[ATTENTION[0]].global_scale) == float(weights[ATTENTION[2]].global_scale) < 1e-3
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    load_model(tmp_path / "out", progress=False)
    with pytest.raises(UserError, match="ModelOpt has no form for INT4"):
        quantize(louder, Recipe("mix", spec=NVFP4(), rules=rules), tmp_path / "m", export="modelopt")
    quantize(
        louder, Recipe("mix", spec=NVFP4(), rules=rules), tmp_path / "t", export="torchao", progress=False
    )
    assert len(stored(tmp_path / "t")) == 24


def test_a_pass_that_was_cut_off_goes_on_and_the_bytes_are_equal(
    louder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PowerCut(BaseException):
        pass

    measured: list[str] = []
    original = WeightQuantizer.measure

    def counted(self, checkpoint, linear, quantizer):
        measured.append(linear.module)
        if len(measured) == 20:
            raise PowerCut
        return original(self, checkpoint, linear, quantizer)

    options = {"max_shard_bytes": 300_000, "progress": False}
    quantize(louder, "nvfp4", tmp_path / "whole", **options)
    monkeypatch.setattr(WeightQuantizer, "measure", counted)
    with pytest.raises(PowerCut):
        quantize(louder, "nvfp4", tmp_path / "out", **options)
    parts = tmp_path / "out" / PARTS_FOLDER
    kept = {module for path in parts.glob(f"*{MEASURED_SUFFIX}") for module in json.loads(path.read_text())}
    assert 10 < len(kept) < 20 and not list(parts.glob(f"*{FINISHED_SUFFIX}"))
    quantize(louder, "nvfp4", tmp_path / "out", **options)
    assert not kept & set(measured[20:])
    assert len(set(measured)) == 28
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_record_with_a_measurement_that_is_no_number_is_refused(louder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tensors, "_groups", lambda *_: [][0])
        with pytest.raises(IndexError):
            quantize(louder, "nvfp4", out, progress=False)
    (part,) = (out / PARTS_FOLDER).glob(f"*{MEASURED_SUFFIX}")
    part.write_text(json.dumps(json.loads(part.read_text()) | {ATTENTION[0]: "large"}))
    with pytest.raises(UserError, match="not readable as a work record"):
        quantize(louder, "nvfp4", out, progress=False)


def test_names_tell_what_is_merged_where_the_model_cannot(
    louder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(louder, "nvfp4", tmp_path / "a", progress=False)
    monkeypatch.setattr(shared_tensors, "merge_groups", lambda *_: [])
    quantize(louder, "nvfp4", tmp_path / "b", progress=False)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("export", HOLD_EXPERTS)
def test_an_expert_s_gate_and_up_share_and_experts_do_not(
    tmp_path: Path, model_type: str, export: str
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 32, "num_local_experts": 4, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.1)
            if name.endswith("gate_up_proj"):
                parameter[2, 32:] *= 50
    model.save_pretrained(tmp_path / "source")
    quantize(tmp_path / "source", load_recipe("nvfp4"), tmp_path / "out", export=export, progress=False)
    weights = stored(tmp_path / "out")
    pair = ("gate_proj", "up_proj") if model_type == "qwen3_moe" else ("w1", "w3")
    scales = [
        {float(w.global_scale) for name, w in weights.items() if f".{i}." in name and name.endswith(pair)}
        for i in range(1, 4)
    ]
    assert [len(found) for found in scales] == [1, 1, 1]
    assert min(scales[1]) > 8 * max(scales[0] | scales[2])
    loaded = load_model(tmp_path / "out", progress=False)
    assert sum("experts" in product for product in loaded.layouts) == 2
    source = open_checkpoint(tmp_path / "source")
    for name, weight in weights.items():
        plain = source.read(f"{name}.weight").float()
        assert float((weight.dequantize(torch.float32) - plain).norm() / plain.norm()) < 0.1
