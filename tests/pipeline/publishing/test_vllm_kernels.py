"""What a card says of vLLM: the layers for which vLLM 0.32 has no kernel, on a CPU and on an NVIDIA GPU."""

from pathlib import Path

import pytest
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.publishing.card import unread_by
from scalegate.pipeline.publishing.vllm_kernels import unread_by_vllm
from scalegate.pipeline.records.recipe import Recipe
from scalegate.tests.pipeline.publishing.passed_artifact import edit_json
from scalegate.tests.pipeline.quantization.tiny_families import make_text

INT4 = Int4(16, symmetric=True)
CASES = {
    # With 24 channels a head, keys alone have 48 rows; merged with queries and values, 192.
    "merged layers are one": ({"head_dim": 24}, INT4, None),
    "outputs": ({"head_dim": 24, "num_key_value_heads": 1}, INT4, "has N = 144, K = 64"),
    "inputs": ({"intermediate_size": 112}, INT4, "model.layers.0.mlp.down_proj has N = 64, K = 112"),
    "FP8 inputs": ({}, Int4(32, symmetric=True, activations="fp8"), "no kernel for INT4 g32"),
    "INT8": ({}, Int8(32), "no kernel for INT8"),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_vllm_does_not_multiply_on_a_cpu_are_named(case: str, tmp_path: Path) -> None:
    shape, spec, reason = CASES[case]
    source = make_text(tmp_path / "source", "llama", **shape)
    recipe = Recipe("case", spec=spec, fit="nearest")
    quantize(source, recipe, tmp_path / "out", progress=False)
    told = unread_by_vllm(open_checkpoint(tmp_path / "out")).get("vLLM on a CPU")
    assert told is None if reason is None else told is not None and reason in told
    unread = unread_by(tmp_path / "out", "llama")
    assert unread.get("vLLM on a CPU") == told and "vLLM" not in unread


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "spec", "told"),
    [
        ({"intermediate_size": 80}, Int4(128, symmetric=True), "down_proj has 16; with `--dtype float16`"),
        ({"intermediate_size": 80}, Int4(128), "down_proj has 16"),
        ({"intermediate_size": 96}, Int4(128, symmetric=True), None),
    ],
    ids=["groups of 16", "with zero points", "groups of 32"],
)
def test_groups_that_vllm_does_not_multiply_on_a_gpu_are_named(
    shape: dict[str, int], spec: Int4, told: str | None, dtype: str, tmp_path: Path
) -> None:
    source = make_text(tmp_path / "source", "llama", **shape)
    edit_json(source / "config.json", dtype=dtype)
    quantize(source, Recipe("case", spec=spec, fit="nearest"), tmp_path / "out", progress=False)
    found = unread_by(tmp_path / "out", "llama").get("vLLM on an NVIDIA GPU")
    if told is None or (spec.symmetric and dtype == "float16"):
        assert found is None
    else:
        assert found is not None and told in found and ("float16" in found) == spec.symmetric
