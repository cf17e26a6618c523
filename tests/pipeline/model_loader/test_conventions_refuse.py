"""Schemes that are not read, and configs that disagree with their tensors: each named in one message."""

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
from scalegate.pipeline.model_loader.load_model import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """`foreign(name, config=, tensors=)`: a copy of a fixture, its config and its tensors changed."""

    def copy(name: str, config: Callable = lambda c: None, tensors: Callable = lambda t: None) -> Path:
        folder = tmp_path / name
        shutil.copytree(FIXTURES / name, folder)
        value = json.loads((folder / "config.json").read_text())
        config(value["quantization_config"])
        (folder / "config.json").write_text(json.dumps(value))
        content = load_file(folder / "model.safetensors")
        tensors(content)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy


def weights(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


def activations_int8(config: dict[str, Any]) -> None:
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(quant_method="gptq", bits=3), "gptq with 2 or 4 or 8 bits, not 3"),
        (lambda c: c.update(quant_method="awq", bits=8), "awq with 4 bits, not 8"),
        (lambda c: c.update(quant_method="quanto"), "quant_method 'quanto'"),
        (lambda c: weights(c).update(num_bits=3), "3-bit int weights"),
        (lambda c: weights(c).update(type="float"), "4-bit float weights"),
        (lambda c: weights(c).update(strategy="block"), "strategy 'block'"),
        (activations_int8, "activations 8-bit int"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    ],
)
def test_an_unsupported_scheme_is_named_with_what_is_read(foreign, change, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        load_model(foreign("llmcompressor-w4a16", config=change), progress=False)
    assert "\n" not in raised.value.message


def int8_group(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_1"]["weights"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c: int8_group(c).update(symmetric=False),
            "is INT8 with zero points; Scalegate reads symmetric INT8",
        ),
        (lambda c: int8_group(c).update(group_size=48), "which group_size 48 does not divide"),
        (lambda c: int8_group(c).update(strategy="tensor"), "strategy 'tensor'"),
    ],
)
def test_int8_that_is_not_read_is_named(foreign, change, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_model(foreign("llmcompressor-int8", config=change), progress=False)


def test_int8_in_groups_that_it_does_not_have_is_named(foreign) -> None:
    def in_groups_of_16(tensors: dict[str, torch.Tensor]) -> None:
        for name, scale in tensors.items():
            if name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale")):
                tensors[name] = scale.repeat_interleave(4, 1)

    folder = foreign("llmcompressor-int8", lambda c: int8_group(c).update(group_size=16), in_groups_of_16)
    with pytest.raises(
        UserError, match="form of INT8 that Scalegate does not read: `group_size` is one of 32, 64"
    ):
        load_model(folder, progress=False)


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{PROJECTION}.weight_scale"), f"{PROJECTION}.weight_scale is missing"),
        (lambda t: t.pop(f"{PROJECTION}.weight_packed"), f"{PROJECTION}.weight_scale"),
        (
            replace(f"{PROJECTION}.weight_scale", lambda s: s[:64]),
            rf"{PROJECTION}.weight_scale has shape \[64, 1\]",
        ),
        (
            replace(f"{PROJECTION}.weight_scale", lambda s: s.to(torch.int32)),
            f"{PROJECTION}.weight_scale has dtype int32",
        ),
        (replace(f"{PROJECTION}.weight_packed", lambda w: w[:64]), f"{PROJECTION}.weight_scale has shape"),
        (replace(f"{PROJECTION}.weight_shape", lambda s: s * 2), f"{PROJECTION}.weight_shape is"),
        (
            lambda t: t.update({f"{PROJECTION}.weight_zero_point": torch.zeros(16, 1, dtype=torch.int32)}),
            f"the config says {PROJECTION} is symmetric",
        ),
        (
            lambda t: t.update({f"{PROJECTION}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}),
            "activation ordering",
        ),
        (replace("model.norm.weight", lambda w: w[:64]), r"model.norm.weight has shape \[64\]"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight missing"),
        (rename("model.norm.weight", "model.extra.weight"), "model.extra.weight in the checkpoint"),
    ],
)
def test_tensors_that_disagree_with_the_config_are_named(foreign, change, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_model(foreign("llmcompressor-w4a16", tensors=change), progress=False)


def test_a_layer_the_config_calls_quantized_but_the_file_holds_plain_is_refused(foreign) -> None:
    def store_plain(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("packed", "scale", "shape"):
            del tensors[f"{PROJECTION}.weight_{suffix}"]
        tensors[f"{PROJECTION}.weight"] = torch.zeros(128, 128, dtype=torch.bfloat16)

    with pytest.raises(UserError, match=f"{PROJECTION} stored unquantized"):
        load_model(foreign("llmcompressor-w4a16", tensors=store_plain), progress=False)


def test_weights_stored_by_a_scheme_that_is_not_read_are_named_with_it(foreign) -> None:
    def scheme(config: dict[str, Any]) -> None:
        config["format"] = config["config_groups"]["group_0"]["format"] = "int-quantized"
        weights(config).update(num_bits=8, type="int", strategy="channel")

    def store_int8(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            del tensors[name], tensors[f"{module}.weight_shape"]
            tensors[f"{module}.weight"] = torch.zeros(128, 128, dtype=torch.int8)

    with pytest.raises(UserError, match="is stored as 'int-quantized', 8-bit int weights; Scalegate reads"):
        load_model(foreign("llmcompressor-w4a16", config=scheme, tensors=store_int8), progress=False)


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
@pytest.mark.parametrize("pattern", [PROJECTION, "model.layers.0*", "model.layers.0.self_attn"])
def test_a_layer_packed_by_modelopt_that_it_excludes_is_refused(foreign, key: str, pattern: str) -> None:
    def exclude(config: dict[str, Any]) -> None:
        others = config.pop("ignore", None) or config.pop("exclude_modules", None) or []
        config[key] = [*others, pattern]

    with pytest.raises(UserError, match="is packed, but the quantization config excludes it"):
        load_model(foreign("modelopt-nvfp4", config=exclude), progress=False)


def test_a_packed_layer_that_the_ignore_list_excludes_is_refused(foreign) -> None:
    with pytest.raises(UserError, match=f"{PROJECTION}.weight_packed is packed"):
        change = lambda c: c["ignore"].append(r"re:.*layers\.0\.self_attn\.q_proj$")  # noqa: E731
        load_model(foreign("llmcompressor-w4a16", config=change), progress=False)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llmcompressor-nvfp4a16", "weight_global_scale"),
        ("modelopt-nvfp4", "weight_scale"),
        ("modelopt-nvfp4", "weight_scale_2"),
        ("torchao-nvfp4", "_weight_qdata"),
    ],
)
def test_a_missing_nvfp4_tensor_is_named(tmp_path: Path, name: str, tensor: str) -> None:
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    content = load_file(folder / "model.safetensors")
    del content[f"{PROJECTION}.{tensor}"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(content, folder / "model.safetensors", metadata)
    with pytest.raises(UserError, match=f"{PROJECTION}.{tensor} is missing"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_bits": 8}, "activations 8-bit float"),
        ({"dynamic": True}, r"activations 4-bit float \(tensor_group, dynamic: True\)"),
        ({"group_size": 32}, "activations 4-bit float"),
    ],
)
def test_nvfp4_with_activations_in_another_format_is_refused(foreign, changed, said: str) -> None:
    change = lambda c: c["config_groups"]["group_0"]["input_activations"].update(changed)  # noqa: E731
    with pytest.raises(UserError, match=said):
        load_model(foreign("llmcompressor-nvfp4", config=change), progress=False)


@pytest.mark.parametrize(
    ("name", "scale"), [("llmcompressor-nvfp4", "input_global_scale"), ("modelopt-nvfp4", "input_scale")]
)
def test_a_scale_of_activations_that_is_no_scale_is_named(foreign, name: str, scale: str) -> None:
    scale = f"{PROJECTION}.{scale}"
    zero = foreign(name, tensors=replace(scale, torch.zeros_like))
    with pytest.raises(UserError, match=rf"{scale} is 0\.0; it has to be positive"):
        load_model(zero, progress=False)
    shutil.rmtree(zero)
    with pytest.raises(UserError, match=f"{scale} is missing"):
        load_model(foreign(name, tensors=lambda t: t.pop(scale)), progress=False)


def test_a_torchao_checkpoint_with_quantized_activations_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "torchao"
    shutil.copytree(FIXTURES / "torchao-nvfp4", folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    described = json.loads(metadata[f"{PROJECTION}.weight"])
    described["_data"]["act_quant_kwargs"] = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {}}
    metadata[f"{PROJECTION}.weight"] = json.dumps(described)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata)
    with pytest.raises(UserError, match=f"{PROJECTION} quantizes its activations as well"):
        load_model(folder, progress=False)


def test_a_torchao_checkpoint_of_another_tensor_type_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "torchao"
    shutil.copytree(FIXTURES / "torchao-nvfp4", folder)
    content = load_file(folder / "model.safetensors")
    names = json.dumps([f"{PROJECTION}.weight"])
    described = json.dumps({"_type": "Float8Tensor", "_data": {}, "_tensor_data_names": ["qdata"]})
    metadata = {f"{PROJECTION}.weight": described, "tensor_names": names}
    save_file(content, folder / "model.safetensors", metadata)
    with pytest.raises(UserError, match=f"{PROJECTION}.weight is a torchao Float8Tensor"):
        load_model(folder, progress=False)
