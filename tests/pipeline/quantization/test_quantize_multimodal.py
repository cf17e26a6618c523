"""Checkpoints with towers: the language model is quantized, all else stays and is declared unquantized."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.targets import first_match, matches
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.tests.pipeline.quantization.tiny_families import (
    MULTIMODAL,
    TEXT_ONLY,
    make_multimodal,
    make_text,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

RECIPE = Recipe("towers", spec=Int4(16))


def section_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def declared_quantized(section: dict[str, Any], module: str) -> bool:
    """As compressed-tensors decides it for a linear layer called `module`."""
    targets = [target for group in section["config_groups"].values() for target in group["targets"]]
    ignored = any(matches(pattern, module) for pattern in section["ignore"])
    return not ignored and first_match(targets, module) is not None


def linears_of(folder: Path, auto_class: Any) -> set[str]:
    """The linear layers of the model that transformers builds for the checkpoint."""
    with torch.device("meta"):
        model = auto_class.from_config(AutoConfig.from_pretrained(folder))
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.fixture(scope="module", params=MULTIMODAL)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A multimodal checkpoint and its artifact."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_multimodal(folder / "source", request.param)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (source / name).write_text("{}")
    quantize(source, RECIPE, folder / "out", progress=False)
    return source, folder / "out"


def test_towers_and_projectors_stay_bit_for_bit(quantized: tuple[Path, Path]) -> None:
    source, out = (load_file(folder / "model.safetensors") for folder in quantized)
    kept = [name for name in source if name in out]
    assert all(torch.equal(source[name], out[name]) for name in kept)
    replaced = {name.removesuffix(".weight") for name in source.keys() - out.keys()}
    assert len(replaced) == 2 * 7, "seven linear layers in each of two decoder layers"
    assert not any("vision" in name or "visual" in name or "projector" in name for name in replaced)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        assert (quantized[1] / name).is_file()


def test_transformers_takes_for_quantized_what_is(quantized: tuple[Path, Path]) -> None:
    source, out = quantized
    section, linears = section_of(out), linears_of(source, AutoModelForImageTextToText)
    found = {name for name in linears if declared_quantized(section, name)}
    assert found == {name for name in linears if "language_model.layers." in name}


def test_readers_by_tensor_take_for_quantized_what_is(quantized: tuple[Path, Path]) -> None:
    section, tensors = section_of(quantized[1]), load_file(quantized[1] / "model.safetensors")
    matrices = [
        n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2 and n.endswith(".weight")
    ]
    assert [name for name in matrices if declared_quantized(section, name) and "embed" not in name] == []
    packed = [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]
    assert packed and all(declared_quantized(section, name) for name in packed)


def test_the_artifact_loads_and_reads_text_as_the_source(quantized: tuple[Path, Path]) -> None:
    before, after = (load_model(folder, progress=False, dtype=torch.float32).model for folder in quantized)
    tokens = torch.randint(3, 100, (1, 16))
    with torch.inference_mode():
        expected, found = before(tokens).logits, after(tokens).logits
        whole = AutoModelForImageTextToText.from_pretrained(quantized[0], dtype=torch.float32).eval()
        assert torch.allclose(expected, whole(tokens).logits, atol=1e-4)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.5


def test_the_verdict_s_subject_says_what_else_it_takes(quantized: tuple[Path, Path]) -> None:
    assert open_checkpoint(quantized[1]).other_inputs == ("images",)


def test_formats_of_their_own_are_declared_under_both_names(tmp_path: Path) -> None:
    source = make_multimodal(tmp_path / "source", "gemma3")
    recipe = Recipe("two", spec=Int4(16), rules=(Rule("*.down_proj", Int8(32)),))
    quantize(source, recipe, tmp_path / "out", progress=False)
    section, linears = section_of(tmp_path / "out"), linears_of(source, AutoModelForImageTextToText)
    bits = {
        target: group["weights"]["num_bits"]
        for group in section["config_groups"].values()
        for target in group["targets"]
    }
    for name in sorted(name for name in linears if "language_model.layers." in name):
        target = first_match(bits, name)
        assert target is not None and bits[target] == (8 if name.endswith("down_proj") else 4), name


@pytest.mark.parametrize("model_type", TEXT_ONLY)
def test_names_that_transformers_changes_are_ignored_under_its_own(tmp_path: Path, model_type: str) -> None:
    source = make_text(tmp_path / "source", model_type)
    artifact = quantize(source, RECIPE, tmp_path / "out", progress=False)
    section, quantized = section_of(tmp_path / "out"), artifact.quantization["modules"]
    linears = linears_of(source, AutoModelForCausalLM)
    claimed = {name for name in linears if declared_quantized(section, name)}
    assert claimed, "a config that declares nothing would pass as well"
    assert len(claimed) == sum(".experts." not in name for name in quantized)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = [n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2 and n.endswith(".weight")]
    assert [name for name in kept if declared_quantized(section, name) and "embed_" not in name] == []


def test_a_recipe_may_ignore_what_is_no_part_of_the_decoder(tmp_path: Path) -> None:
    source = make_multimodal(tmp_path / "source", "gemma3")
    recipe = Recipe(
        "towers", spec=Int4(16), ignore=("*vision_tower*", "re:.*lm_head", "*multi_modal_projector*")
    )
    assert quantize(source, recipe, tmp_path / "out", progress=False).quantization["modules"]
    misspelt = Recipe("towers", spec=Int4(16), ignore=("*vision_towr*",))
    with pytest.raises(UserError, match=r"`ignore` pattern '\*vision_towr\*' matches no linear module"):
        quantize(source, misspelt, tmp_path / "other", progress=False)
