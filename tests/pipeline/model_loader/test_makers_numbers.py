"""Sources below 16 bits are read to the very bits that their makers' libraries dequantize them to."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.checkpoints.decoded_tensors import DecodedTensor
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.tests.pipeline.fixtures.sources.make_sources import EXPECTED, HERE, MAKERS, StoredLayer
from torch import Tensor


def read(made: StoredLayer, folder: Path) -> Tensor:
    """The weight as Scalegate reads it from a checkpoint with these tensors."""
    section = {"model_type": "llama", "quantization_config": made.section}
    (folder / "config.json").write_text(json.dumps(section))
    save_file(
        {name: tensor.contiguous() for name, tensor in made.tensors.items()}, folder / "model.safetensors"
    )
    checkpoint = open_checkpoint(folder)
    if isinstance(checkpoint.tensors["layer.weight"], DecodedTensor):
        return checkpoint.read("layer.weight")
    weight = convention_of(checkpoint).modules(checkpoint)["layer"].read()
    assert isinstance(weight, Tensor)
    return weight


def assert_same_bits(made: StoredLayer, folder: Path) -> None:
    ours = read(made, folder)
    assert ours.dtype in (torch.float16, torch.bfloat16) and len(ours.unique()) > 50
    assert torch.equal(ours, made.expected.to(ours.dtype))


def test_there_are_bytes_of_every_maker() -> None:
    assert {path.stem for path in HERE.glob("*.safetensors")} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_the_makers_bytes_are_read_to_the_makers_numbers(name: str, tmp_path: Path) -> None:
    with safe_open(HERE / f"{name}.safetensors", "pt") as file:
        section = json.loads(file.metadata()["quantization_config"])
        tensors = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118 - no mapping
    expected = tensors.pop(EXPECTED)
    assert_same_bits(StoredLayer(section, tensors, expected), tmp_path)


# The libraries take six seconds to import.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MAKERS)
def test_so_are_those_of_the_library_that_is_installed(name: str, tmp_path: Path) -> None:
    library, make = MAKERS[name]
    pytest.importorskip(library)
    assert_same_bits(make(), tmp_path)
