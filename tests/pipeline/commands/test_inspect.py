"""`pipeline inspect` counts bits exactly, reads checkpoints of others, and says when bytes changed."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.inspect import command
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.records.artifact import Artifact, record_files
from transformers import AutoConfig, AutoModelForCausalLM

N, K, GROUP = 256, 512, 128


@pytest.fixture
def foreign(tmp_path, example_checkpoint):
    """A compressed-tensors checkpoint by other hands: one asymmetric INT4 layer, one matrix kept."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    config = json.loads((example_checkpoint / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config |= {"hidden_size": K, "intermediate_size": N, "num_hidden_layers": 1, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0.mlp.up_proj"
    save_file(
        {
            f"{layer}.weight_packed": torch.zeros(N, K // 8, dtype=torch.int32),
            f"{layer}.weight_scale": torch.ones(N, K // GROUP, dtype=torch.bfloat16),
            f"{layer}.weight_zero_point": torch.zeros(N // 8, K // GROUP, dtype=torch.int32),
            f"{layer}.weight_shape": torch.tensor([N, K]),
            "model.embed_tokens.weight": torch.zeros(64, K, dtype=torch.bfloat16),
            "model.norm.weight": torch.zeros(K, dtype=torch.bfloat16),
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def test_bits_per_weight_count_codes_scales_zero_points_and_shape(foreign):
    inspection = inspect(foreign)
    (summary,) = inspection.formats
    groups = N * K // GROUP
    nbytes = N * K // 2 + groups * 2 + groups // 2 + 2 * 8
    assert summary.nbytes == nbytes
    assert summary.bits_per_weight == nbytes * 8 / (N * K)
    assert summary.bits_per_weight == pytest.approx(4 + (16 + 4) / GROUP, abs=2e-3)
    assert inspection.quantized_modules == 1
    assert inspection.kept_modules == ["model.embed_tokens"]
    assert inspection.kept_nbytes == 64 * K * 2 + K * 2
    assert not inspection.is_artifact


def test_a_plain_checkpoint_has_nothing_quantized(example_checkpoint):
    inspection = inspect(example_checkpoint)
    assert inspection.convention == "plain"
    assert inspection.formats == []
    assert len(inspection.kept_modules) == 29


def with_manifest(folder):
    Artifact("maker/base", None, {"name": "int4-hqq"}, {"torch": "2.13.0"}, record_files(folder)).write(
        folder
    )


def test_an_artifact_whose_bytes_changed_says_which(foreign):
    with_manifest(foreign)
    assert inspect(foreign).changed_files == []
    (foreign / "extra.json").write_text("{}")
    assert inspect(foreign).changed_files == ["extra.json: not recorded"]
    shown = CliRunner().invoke(command, [str(foreign)])
    assert "CHANGED" in shown.output and "extra.json" in shown.output


def test_an_artifact_that_no_longer_opens_names_the_changed_file(foreign):
    with_manifest(foreign)
    path = foreign / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"are not the quantized ones:\n  model\.safetensors: \d+ bytes"):
        inspect(foreign)


def test_json_holds_what_the_terminal_shows(foreign):
    with_manifest(foreign)
    value = json.loads(CliRunner().invoke(command, [str(foreign), "--json"]).output)
    assert value["formats"][0]["bits_per_weight"] == inspect(foreign).formats[0].bits_per_weight
    assert value["verdict"] is None
    assert value["source"] == "maker/base"
    text = CliRunner().invoke(command, [str(foreign)]).output
    assert "1 modules, INT4 g128, zero points: 4.15" in text
    assert "as recorded" in text


def test_a_broken_foreign_checkpoint_is_one_message(foreign, tmp_path):
    copy = shutil.copytree(foreign, tmp_path / "copy")
    (copy / "config.json").unlink()
    result = CliRunner().invoke(command, [str(copy)])
    assert result.exit_code == 2
    assert "config.json" in result.output


def test_states_of_recurrent_layers_are_counted_for_each_request(tmp_path, example_checkpoint):
    config = AutoConfig.for_model(
        "lfm2",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    # Two convolutions of 64 channels keep all but one of conv_L_cache inputs, in bfloat16.
    assert inspect(tmp_path).state_bytes == 2 * 64 * (config.conv_L_cache - 1) * 2
    assert inspect(example_checkpoint).state_bytes == 0
    shown = CliRunner().invoke(command, [str(tmp_path)])
    assert "512 bytes of recurrent layers for each request" in shown.output
