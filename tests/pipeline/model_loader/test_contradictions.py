"""Config and files that contradict each other: every command names module and tensor, and does nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.adopt import adopt
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.conventions.compressed_tensors.convention import FP8_KV_CACHE
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader.contradictions import refuse_contradictions
from scalegate.pipeline.model_loader.served_checkpoint import build_engine
from scalegate.pipeline.records.recipe import Recipe
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.exhaustive import exhaustive_but
from torch import Tensor

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROJECTION = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]
COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "adopt": lambda folder, baseline: adopt(folder, baseline, progress=False),
    "inspect": lambda folder, baseline: inspect(folder),
    "serve": lambda folder, baseline: build_engine(folder, EngineOptions(device="cpu")),
    "validate": lambda folder, baseline: validate(folder, baseline, progress=False),
}


def set_first(name: str, value: float) -> Callable[[Tensors], None]:
    """The first number of a tensor in another's place."""

    def change(tensors: Tensors) -> None:
        changed = tensors[name].float().flatten()
        changed[0] = value
        tensors[name] = changed.view(tensors[name].shape).to(tensors[name].dtype)

    return change


def store_plain(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{PROJECTION}.")]:
        del tensors[name]
    tensors[f"{PROJECTION}.weight"] = torch.zeros(128, 128, dtype=torch.bfloat16)


def another_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def kv_scales(value: float) -> Callable[[Tensors], None]:
    """A scale of one layer's keys, and none of its values."""
    return lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor([value])})


def half_the_rows(tensors: Tensors) -> None:
    for part in ("packed", "scale"):
        name = f"{PROJECTION}.weight_{part}"
        tensors[name] = tensors[name][:64].contiguous()
    tensors[f"{PROJECTION}.weight_shape"][0] = 64


def shorter_norm(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def stores_fp8_keys(config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_scheme"] = FP8_KV_CACHE


def ties(config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True


def excludes(key: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"][key] = [*(config["quantization_config"].get(key) or []), PROJECTION]

    return change


def nothing(value: dict[str, Any]) -> None:
    pass


CT, MODELOPT, TORCHAO = "llmcompressor-w4a16", "modelopt-nvfp4", "torchao-nvfp4"
CT_NVFP4, INT8 = "llmcompressor-nvfp4", "llmcompressor-int8"
NORM = "model.norm.weight"
SCALE, SHAPE = f"{PROJECTION}.weight_scale", f"{PROJECTION}.weight_shape"
CONTRADICTIONS = {
    "packed, ignored": (CT, excludes("ignore"), nothing, f"{PROJECTION}.weight_packed is packed"),
    "packed, excluded": (MODELOPT, excludes("ignore"), nothing, f"{PROJECTION}.weight is packed"),
    "packed, not to convert": (
        TORCHAO, excludes("modules_to_not_convert"), nothing, f"{PROJECTION}._weight_qdata is packed",
    ),
    "plain, covered": (CT, nothing, store_plain, f"{PROJECTION} stored unquantized"),
    "plain, covered, ModelOpt": (MODELOPT, nothing, store_plain, f"{PROJECTION} stored unquantized"),
    "NaN": (CT, nothing, set_first(SCALE, torch.nan), rf"{PROJECTION}: 1 of \d+ numbers in {SCALE} are NaN"),
    "infinite": (CT, nothing, set_first(SCALE, torch.inf), rf"numbers in {SCALE} are NaN or infinite"),
    "NaN in E4M3": (MODELOPT, nothing, set_first(SCALE, torch.nan), f"numbers in {SCALE} are NaN"),
    "zero": (CT, nothing, set_first(SCALE, 0.0), f"{SCALE} is zero for codes that are not zero"),
    "zero in E4M3": (MODELOPT, nothing, set_first(SCALE, 0.0), f"{SCALE} is zero for codes that are not"),
    "zero for all": (
        MODELOPT, nothing, set_first(f"{SCALE}_2", 0.0), f"{SCALE}_2 is zero for codes that are not zero",
    ),
    "negative in E4M3": (MODELOPT, nothing, set_first(SCALE, -1.0), f"{SCALE} is negative"),
    "negative for all": (
        CT_NVFP4, nothing, set_first(f"{PROJECTION}.weight_global_scale", -1.0), "global_scale is (neg|-1.0)",
    ),
    "inputs' scale": (
        MODELOPT, nothing, set_first(f"{PROJECTION}.input_scale", 0.0), "input_scale is 0.0; it has to be",
    ),
    "NaN in a norm": (CT, nothing, set_first(NORM, torch.nan), f"1 of 128 numbers in {NORM} are NaN"),
    "infinite norm": (TORCHAO, nothing, set_first(NORM, torch.inf), f"numbers in {NORM} are NaN or infinite"),
    "NaN in KV": (CT, stores_fp8_keys, kv_scales(torch.nan), "k_scale"),
    "KV scale for keys alone": (CT, stores_fp8_keys, kv_scales(1.0), "has a KV scale for k only"),
    "weight_shape": (
        CT, nothing, set_first(SHAPE, 64), rf"{SHAPE} is \[64, 128\], but .* holds",
    ),
    "weight_shape, INT8": (
        INT8, nothing, set_first(SHAPE, 64), rf"{SHAPE} is \[64, 128\], but .* holds",
    ),
    "rows": (CT, nothing, half_the_rows, r"q_proj.weight has shape \[64, 128\]; by the config .*128, 128"),
    "short norm": (CT, nothing, shorter_norm, r"norm.weight has shape \[127\]; by the config .* \[128\]"),
    "tied": (CT, ties, another_head, "ties lm_head.weight to model.embed_tokens.weight"),
}  # fmt: skip


@pytest.fixture(params=CONTRADICTIONS)
def contradiction(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A fixture of another maker with one thing wrong, and how that is said."""
    name, edit, change, said = CONTRADICTIONS[request.param]
    folder = tmp_path / "wrong"
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata)
    return folder, said


def test_each_command_names_it(contradiction: tuple[Path, str], random_checkpoint: Any) -> None:
    folder, said = contradiction
    baseline = random_checkpoint("llama")
    for command in COMMANDS.values():
        with pytest.raises(UserError, match=said):
            command(folder, baseline)


@pytest.mark.parametrize("name", [CT, CT_NVFP4, MODELOPT, TORCHAO, INT8, "llmcompressor-mixed"])
def test_sound_checkpoints_of_others_contradict_nothing(name: str) -> None:
    refuse_contradictions(open_checkpoint(FIXTURES / name))


def test_a_mask_that_old_versions_saved_may_be_infinite(tmp_path: Path) -> None:
    folder = tmp_path / "masked"
    shutil.copytree(FIXTURES / CT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.attn.masked_bias"] = torch.tensor(-torch.inf, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refuse_contradictions(open_checkpoint(folder))


def test_equal_tensors_may_be_tied(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(FIXTURES / CT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refuse_contradictions(open_checkpoint(folder))


@pytest.mark.parametrize(
    "spec",
    exhaustive_but([Int4(32), Int4(32, symmetric=True), Int8(), NVFP4(), IQ2XXS()], Int4(32), NVFP4()),
    ids=str,
)
def test_a_block_of_zeros_or_of_the_tiniest_numbers_is_no_contradiction(
    spec: WeightFormat, two_layers: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(two_layers, source)
    tensors = load_file(source / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    weight[:8], weight[8:16], weight[16:24] = 0, 1e-30, 1e-38
    weight[24:32, :128] = 1e-6
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    quantize(source, Recipe("zeros", spec=spec), tmp_path / "out", progress=False)
    refuse_contradictions(open_checkpoint(tmp_path / "out"))


def test_nan_is_found_among_scales_in_bytes(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, Recipe("mx", spec=MXFP4()), tmp_path / "out", progress=False)
    path = next((tmp_path / "out").glob("*.safetensors"))
    tensors = load_file(path)
    tensors[SCALE][0, 0] = 255  # E8M0's NaN
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=rf"1 of [\d,]+ numbers in {SCALE} are NaN"):
        refuse_contradictions(open_checkpoint(tmp_path / "out"))


def test_scales_of_sources_are_looked_at_too(random_checkpoint: Any, edit: Any) -> None:
    folder = random_checkpoint("llama", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    name = f"{PROJECTION}.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    for scale, said in ((torch.nan, "are NaN or infinite"), (0.0, "is zero for codes that are not zero")):
        tensors[f"{name}_scale"] = torch.tensor([scale])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        edit(folder, quantization_config={"quant_method": "fp8"})
        with pytest.raises(UserError, match=f"{PROJECTION}: .*{name}_scale {said}"):
            inspect(folder)
        with pytest.raises(UserError, match=said):
            stored_weights(open_checkpoint(folder))[PROJECTION].read()
