"""FP8 as its makers write it: read to the same numbers by every command, whatever declares it."""

import json
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
from scalegate.pipeline.validation.subject import describe_baseline, describe_quantization
from scalegate.tests.pipeline.source_forms import DIALECTS, spread
from scalegate.tests.pipeline.transformers_reader import assert_transformers_reads_int4_of
from torch import Tensor

Source = tuple[Path, dict[str, Tensor]]


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
    baseline = describe_baseline(open_checkpoint(folder), {})
    assert (baseline.quantization, baseline.stored_as) == ("none", shown.formats[0].format)
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
    checkpoint = open_checkpoint(pair.quantized)
    assert checkpoint.quantization_config == config["compression_config"]
    # What is served packed is no 16-bit baseline.
    assert describe_baseline(checkpoint, {}).stored_as is None
    assert describe_baseline(checkpoint, {}).quantization == describe_quantization(checkpoint) != "none"
    found = CliRunner().invoke(main, ["inspect", str(pair.quantized), "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["convention"] == "compressed-tensors"


@pytest.mark.exhaustive
def test_transformers_reads_what_is_made_of_it(source: Source, tmp_path: Path) -> None:
    assert_transformers_reads_int4_of(source[0], tmp_path / "out")
