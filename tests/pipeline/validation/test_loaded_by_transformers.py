"""Artifacts that transformers with compressed-tensors loads: all of their tensors, and to our logits.

Those that it does not load are known beforehand.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.conventions.targets import first_match
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.loaded_by_transformers import why_transformers_fails
from scalegate.pipeline.publishing.card import unread_by
from scalegate.pipeline.publishing.vllm_kernels import VLLM_ON_A_CPU, VLLM_ON_A_GPU
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.pipeline.records.recipe_fields import NEAREST
from scalegate.pipeline.validation.also_load import read_by_transformers
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.pipeline.quantization.tiny_families import (
    add_prediction_head,
    make_multimodal,
    make_text,
)
from scalegate.tests.pipeline.transformers_reader import BOUND, read_by_both, round_scales
from transformers import CompressedTensorsConfig

FIXTURES = Path(__file__).parent.parent / "fixtures"
SYMMETRIC = Int4(16, symmetric=True)
RECIPE = Recipe("read elsewhere", spec=SYMMETRIC)
WITH_ZERO_POINTS = Recipe("zero points", spec=Int4(16))


def with_value_head(folder: Path) -> Path:
    source = make_text(folder, "llama")
    path = source / "model.safetensors"
    save_file(load_file(path) | {"v_head.summary.weight": torch.randn(1, 64)}, path, {"format": "pt"})
    return source


Case = tuple[Callable[[Path], Path], Recipe]
LOADED: dict[str, Case] = {
    "layers kept": (
        lambda folder: make_text(folder, "llama"),
        Recipe("kept", spec=SYMMETRIC, ignore=("*.down_proj", "*.layers.1.self_attn.*")),
    ),
    "names that transformers changes": (lambda folder: make_text(folder, "gpt_neox"), RECIPE),
    "towers": (lambda folder: make_multimodal(folder, "gemma3"), RECIPE),
    "towers with rules of their names": (lambda folder: make_multimodal(folder, "qwen2_5_vl"), RECIPE),
    "experts one by one": (
        lambda folder: make_text(folder, "qwen3_moe"),
        Recipe("zero points where readers take them", spec=Int4(16), fit=NEAREST),
    ),
    "experts one upon another": (lambda folder: make_text(folder, "phimoe"), RECIPE),
    "a prediction head": (
        lambda folder: add_prediction_head(make_text(folder, "qwen3_5_text")),
        RECIPE,
    ),
    "tensors left out": (
        with_value_head,
        Recipe("without", spec=SYMMETRIC, leave_out=("v_head.*",)),
    ),
    "groups that fit": (
        lambda folder: make_text(folder, "llama", intermediate_size=176),
        Recipe("fit", spec=Int4(32, symmetric=True), fit=NEAREST),
    ),
    "two formats": (
        lambda folder: make_text(folder, "llama"),
        Recipe("two", spec=SYMMETRIC, rules=(Rule("*.down_proj", Int8(32)),)),
    ),
}


@pytest.mark.parametrize(
    "case", exhaustive_but(LOADED, "layers kept", "towers", "experts one by one", "groups that fit")
)
def test_transformers_loads_every_tensor_to_our_logits(case: str, tmp_path: Path) -> None:
    make, recipe = LOADED[case]
    artifact = quantize(make(tmp_path / "source"), recipe, tmp_path / "out", progress=False)
    assert artifact.quantization["modules"]
    round_scales(tmp_path / "out")
    assert why_transformers_fails(open_checkpoint(tmp_path / "out")) is None
    error, strayed = read_by_both(tmp_path / "out")
    assert strayed == set() and error <= BOUND


def test_what_int4_changes_and_a_tensor_too_many_are_seen(tmp_path: Path) -> None:
    source = make_text(tmp_path / "source", "llama")
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    assert read_by_both(tmp_path / "out", meant=source)[0] > 3 * BOUND
    path, name = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    kept = load_file(source / "model.safetensors")[name]
    save_file(load_file(path) | {name: kept}, path, {"format": "pt"})
    assert read_by_both(tmp_path / "out", meant=source)[1] == {name}


@pytest.mark.parametrize("recipe", [WITH_ZERO_POINTS, RECIPE], ids=["zero points", "symmetric"])
def test_zero_points_are_where_compressed_tensors_reads_them(tmp_path: Path, recipe: Recipe) -> None:
    quantize(make_text(tmp_path / "source", "llama"), recipe, tmp_path / "out", progress=False)
    round_scales(tmp_path / "out")
    error, strayed = read_by_both(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert strayed == set() and error <= BOUND


def test_zero_points_of_compressed_tensors_own_files_are_read_to_its_numbers() -> None:
    checkpoint = open_checkpoint(FIXTURES / "llmcompressor-mixed")
    groups = (checkpoint.quantization_config or {})["config_groups"].values()
    weights = {target: group["weights"] for group in groups for target in group["targets"]}
    seen = 0
    for module, stored in convention_of(checkpoint).modules(checkpoint).items():
        named = {n.removeprefix(f"{module}."): n for n in checkpoint.tensors if n.startswith(f"{module}.")}
        tensors = {part: checkpoint.read(name) for part, name in named.items()}
        args = QuantizationArgs(**weights[first_match(weights, module)])
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
        # They round the product to the scale's bf16 once: 2^-9 of it.
        ours = stored.read().dequantize(torch.float32)
        assert torch.all((theirs.float() - ours).abs() <= ours.abs() * 2**-8), module
        seen += "weight_zero_point" in tensors
    assert seen == 6


UNLOADED: dict[str, tuple[str, Recipe, str]] = {
    "experts without a rule": ("gpt_oss", RECIPE, "no rule that stacks single experts"),
    "experts with zero points": ("qwen3_moe", WITH_ZERO_POINTS, "no zero points of packed experts"),
    "experts kept": (
        "qwen3_moe",
        Recipe("kept", spec=SYMMETRIC, ignore=("*.experts.*",)),
        "takes packed experts alone",
    ),
    "layers that are initialized": ("nanochat", RECIPE, "initializes weights"),
}


@pytest.mark.parametrize("case", exhaustive_but(UNLOADED, "experts without a rule"))
def test_what_transformers_cannot_load_is_known_beforehand(case: str, tmp_path: Path) -> None:
    model_type, recipe, reason = UNLOADED[case]
    quantize(make_text(tmp_path / "source", model_type), recipe, tmp_path / "out", progress=False)
    artifact = open_checkpoint(tmp_path / "out")
    told = why_transformers_fails(artifact)
    assert told is not None and reason in told
    try:
        strayed = read_by_both(tmp_path / "out")[1]
    except (RuntimeError, AttributeError):
        strayed = {"it raises"}
    assert strayed
    unread = unread_by(tmp_path / "out", model_type)
    assert unread.pop("transformers") == told
    # `test_vllm_kernels.py` has those for which vLLM has no kernel on some device.
    everywhere = [reader for reader in unread if reader not in (VLLM_ON_A_CPU, VLLM_ON_A_GPU)]
    assert everywhere == (["vLLM"] if model_type == "gpt_oss" else [])
    ours = load_model(tmp_path / "out", progress=False).model
    assert read_by_transformers(artifact, ours, torch.arange(3, 27)).refused == told
