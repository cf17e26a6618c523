"""An artifact's bytes stay what they were before recipes could mix formats, file by file."""

import hashlib
from pathlib import Path

import pytest
from scalegate.pipeline.commands.quantize import MAX_SHARD_BYTES, quantize
from scalegate.tests.exhaustive import exhaustive_but

pytestmark = pytest.mark.numeric

SHIPPED = {
    "int4-symmetric": "db906e13cfab7d29b8147868362c57c5c07b5ca6f147b31118cd1ee8a756bbf5",
    "int4-hqq": "cf1ef835b498fed6c18115fdb29f8f903546dabc66a861fe704e17781565edf3",
    "int4-hqq-g64": "6dd1f8655f4a4bb8f57dbefa6db7a99e0aa3fe63b9746f2239fb0f5517a50dff",
    "int4-hqq-g32": "36b7cbed4d2f88619be1f8811bf6cd5828c01d580a301941a567a5d91c94c28d",
}
RULES = "format: int4\nrules:\n  - modules: '*.down_proj'\n    group_size: 32\n"
OWN = {
    "several shards": (
        f"{RULES}  - modules: '*.layers.2.*'\n    ignore: true\nlm_head: quantize\nembeddings: quantize\n",
        "compressed-tensors",
        700_000,
        "e9163291a906cc3446129c7e41512f8027f276ada26f85d2c50b7d24108c987a",
    ),
    "symmetric": (
        "symmetric: true\ngroup_size: 64\nrules:\n  - modules: '*.o_proj'\n    group_size: 128\n",
        "compressed-tensors",
        MAX_SHARD_BYTES,
        "9b1e96ef79709134d9de66a889c3c08acdcb588814d731da2574aebd3bff73e7",
    ),
    "torchao": (
        "symmetric: true\ngroup_size: 64\nrules:\n  - modules: '*.o_proj'\n    group_size: 128\n",
        "torchao",
        1_000_000,
        "24a0226a438948919139661726510b9698c7b5234bbaee6bb0404c079a630c95",
    ),
}


@pytest.mark.parametrize("recipe", exhaustive_but(SHIPPED, "int4-hqq"))
def test_the_shipped_recipes_write_the_bytes_they_always_wrote(
    example_checkpoint: Path, tmp_path: Path, recipe: str
) -> None:
    artifact = quantize(example_checkpoint, recipe, tmp_path / "out", progress=False)
    assert artifact.files["model.safetensors"].sha256 == SHIPPED[recipe]


@pytest.mark.parametrize("name", exhaustive_but(OWN, "several shards", "torchao"))
def test_so_do_rules_shards_and_the_other_export_config_and_index_included(
    example_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    text, export, max_shard_bytes, expected = OWN[name]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    artifact = quantize(
        example_checkpoint,
        recipe,
        tmp_path / "out",
        export=export,
        max_shard_bytes=max_shard_bytes,
        progress=False,
    )
    digest = hashlib.sha256()
    for file in sorted(artifact.files):
        if ".safetensors" in file or file == "config.json":
            digest.update(f"{file}\0{artifact.files[file].sha256}\n".encode())
    assert digest.hexdigest() == expected
