"""Input that cannot be used: on the command line each is exit status 2, one clear message, no traceback."""

import contextlib
import json
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.pipeline.cli.main import main

pytestmark = pytest.mark.long

A_WEIGHT = "model.layers.0.mlp.down_proj.weight"


def refusal(*arguments: object) -> str:
    """The one message of a command that must refuse."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    return errors[0] + result.stderr.split(errors[0], 1)[1]


@pytest.fixture
def checkpoint(example_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint that a test may spoil."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(example_checkpoint, folder)
    return folder


def change_weight(checkpoint: Path, change) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[A_WEIGHT] = change(tensors[A_WEIGHT])
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def change_config(checkpoint: Path, **values: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def split_in_two(checkpoint: Path) -> None:
    """Two shards and an index, as larger checkpoints have."""
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, checkpoint / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_config(checkpoint: Path) -> list[str]:
    (checkpoint / "config.json").unlink()
    return ["config.json"]


def malformed_config(checkpoint: Path) -> list[str]:
    (checkpoint / "config.json").write_text('{"model_type": "qwen3",')
    return ["config.json", "JSON"]


def truncated_shard(checkpoint: Path) -> list[str]:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return ["model.safetensors"]


def absent_shard(checkpoint: Path) -> list[str]:
    split_in_two(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    return ["model-00002-of-00002.safetensors"]


def nan_weight(checkpoint: Path) -> list[str]:
    change_weight(checkpoint, lambda weight: weight.index_fill(0, torch.tensor([7]), float("nan")))
    return [A_WEIGHT, "NaN"]


def infinite_weight(checkpoint: Path) -> list[str]:
    change_weight(checkpoint, lambda weight: weight.index_fill(1, torch.tensor([3]), float("inf")))
    return [A_WEIGHT, "infinite"]


def integer_weight(checkpoint: Path) -> list[str]:
    change_weight(checkpoint, lambda weight: weight.to(torch.int32))
    return [A_WEIGHT, "int32"]


def unknown_architecture(checkpoint: Path) -> list[str]:
    change_config(checkpoint, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    return ["nonesuch"]


def empty_folder(checkpoint: Path) -> list[str]:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return [str(checkpoint)]


SPOILED = [
    missing_config,
    malformed_config,
    truncated_shard,
    absent_shard,
    nan_weight,
    infinite_weight,
    integer_weight,
    unknown_architecture,
    empty_folder,
]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_checkpoint_is_not_quantized(spoil, checkpoint, tmp_path):
    words = spoil(checkpoint)
    message = refusal("quantize", checkpoint, "--out", tmp_path / "out", "--device", "cpu")
    assert all(word in message for word in words), message
    assert not (tmp_path / "out" / "scalegate.json").exists()


def test_the_unspoiled_checkpoint_is_quantized(checkpoint, tmp_path):
    command = ["quantize", str(checkpoint), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "scalegate.json").exists()


def test_an_unsupported_layer_type_is_named_before_anything_is_served(checkpoint):
    change_config(checkpoint, layer_types=["full_attention", "linear_attention"] * 2)
    message = refusal("serve", checkpoint, "--port", 0)
    assert "linear_attention" in message


def test_a_read_only_target(checkpoint):
    message = refusal("quantize", checkpoint, "--out", "/proc/scalegate", "--device", "cpu")
    assert "/proc/scalegate" in message


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """What is written beyond `size` fails, as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_no_room_loses_nothing_that_was_finished(checkpoint, tmp_path):
    split_in_two(checkpoint)
    out = tmp_path / "out"
    command = ["quantize", str(checkpoint), "--out", str(out), "--device", "cpu"]
    sizes = sorted(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert sizes[0] < sizes[1] // 2
    with files_limited_to(2 << 20):
        refusal(*command)
    assert not (out / "scalegate.json").exists()
    for path in out.rglob("*.safetensors"):
        load_file(path)

    assert CliRunner().invoke(main, command).exit_code == 0
    assert (out / "scalegate.json").exists()


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    message = refusal("quantize", "some-org/some-model", "--out", tmp_path / "out")
    assert "some-org/some-model" in message


def test_a_port_in_use(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal("serve", checkpoint, "--port", port)


@pytest.mark.exhaustive
def test_m_beyond_capacity(checkpoint, tmp_path):
    message = refusal(
        "validate", checkpoint, "--baseline", checkpoint, "--m", "1,100000", "--quality-tokens", 1024
    )
    assert "100000" in message


RECIPES = {
    "malformed": ("format: int4\ngroup_size: [64\n", ["line"]),
    "unknown key": ("format: int4\ngroupsize: 64\n", ["groupsize", "group_size"]),
    "wrong type": ("format: int4\ngroup_size: many\n", ["group_size", "many"]),
    "a rule that matches nothing": (
        "format: int4\ngroup_size: 64\nrules:\n  - modules: '*.no_such_layer'\n    group_size: 32\n",
        ["no_such_layer"],
    ),
    "a group size that does not divide K": (
        "format: int4\ngroup_size: 512\n",
        ["512", "model.layers.0"],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_cannot_be_followed(name, checkpoint, tmp_path):
    text, words = RECIPES[name]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    message = refusal("quantize", checkpoint, "--recipe", recipe, "--out", tmp_path / "out")
    assert all(word in message for word in words), message


def test_an_unknown_recipe_lists_those_there_are(checkpoint, tmp_path):
    message = refusal("quantize", checkpoint, "--recipe", "int4-nonesuch", "--out", tmp_path / "out")
    assert "int4-nonesuch" in message and "int4-hqq" in message
