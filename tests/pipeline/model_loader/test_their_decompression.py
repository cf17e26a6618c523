"""Every artifact in compressed-tensors' convention has the weights that its own library decompresses."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.checkpoints.checkpoint import Checkpoint, open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from torch import Tensor

SPECS: dict[str, WeightFormat] = {
    "int4-symmetric": Int4(32, symmetric=True),
    "int4-hqq": Int4(32),
    "int8": Int8(32),
    "int8 whole rows": Int8(-1),
    "fp8": load_recipe("fp8").spec,
    "int4-fp8": Int4(32, symmetric=True, activations="fp8"),
    "nvfp4": NVFP4(),
}


def decompressed(checkpoint: Checkpoint, module: str) -> Tensor:
    """The weight as compressed-tensors computes it, from the tensors and the config group of the files."""
    [group] = (checkpoint.quantization_config or {})["config_groups"].values()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    tensors = {
        name.removeprefix(f"{module}."): checkpoint.read(name)
        for name in checkpoint.tensors
        if name.startswith(f"{module}.")
    }
    weight: Tensor = BaseCompressor.get_value_from_registry(group["format"]).decompress(tensors, scheme)[
        "weight"
    ]
    return weight


@pytest.mark.parametrize("recipe", SPECS)
def test_the_makers_library_decompresses_our_files_to_our_bits(recipe: str, tmp_path: Path) -> None:
    source = make_text(tmp_path / "source", "llama")
    quantize(source, Recipe(recipe, spec=SPECS[recipe]), tmp_path / "out", progress=False)
    checkpoint = open_checkpoint(tmp_path / "out")
    stored = {m: w for m, w in convention_of(checkpoint).modules(checkpoint).items() if w.is_quantized}
    assert len(stored) == 14
    for module, weight in stored.items():
        theirs = decompressed(checkpoint, module)
        ours = weight.read().dequantize(theirs.dtype)
        assert torch.equal(theirs, ours), (module, theirs.dtype, (theirs.float() - ours.float()).abs().max())
