"""Sources below 16 bits are validated and released as any other; the card says what they were read from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands import release as release_module
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.release import release
from scalegate.pipeline.commands.release_preview import preview_release
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.validation.subject import describe_baseline
from scalegate.tests.pipeline.publishing.stand_in_gate import StandInGate
from scalegate.tests.pipeline.source_forms import DIALECTS, FORMS, stored_as
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]
RECIPE = """
format: int4
group_size: 32
min_top1_agreement: 0.5
least_output_len: 8
"""
MXFP4 = "MXFP4"
MAKERS = {form: form.split(",")[0] for form in [*FORMS, MXFP4] if form not in DIALECTS}
"""How the names of forms begin that are not FP8."""
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def of_gpt_oss(example: Path, folder: Path) -> Path:
    """A random one with the example's tokenizer, its experts as they are published."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder / name)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 3]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, (experts, n, k // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


@pytest.fixture
def source_in(example_checkpoint: Path, tmp_path: Path) -> Any:
    """`source_in(form)`: the example in that form; of MXFP4, which holds experts alone, a random gpt-oss."""

    def make(form: str) -> Path:
        folder = tmp_path / "source"
        if form == MXFP4:
            return of_gpt_oss(example_checkpoint, folder)
        return stored_as(form, example_checkpoint, folder)

    return make


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("form", [*FORMS, MXFP4])
def test_it_is_released_and_the_card_says_what_it_was_read_from(
    form: str, source_in: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEGATE_CACHE", str(tmp_path / "cache"))
    source, gate = source_in(form), StandInGate()
    described = describe_baseline(open_checkpoint(source), {})
    assert described.quantization == "none"
    gate.stored_as = described.stored_as
    monkeypatch.setattr(release_module, "validate", gate)
    to = f"folder:{tmp_path / 'release'}"
    options = {"work": tmp_path / "work", "m": (1, 32), "device": "cpu"}
    assert preview_release(source, recipe, to, **options).validate.baseline == str(source)
    result = release(source, recipe, to, progress=False, **options)
    assert [stage.name for stage in result.stages] == ["quantize", "layout", "validate", "push"]
    card = (tmp_path / "release" / "README.md").read_text()
    assert f"The baseline is stored as {described.stored_as}; it was compared as" in card
    assert "unquantized" not in card.split("All figures below")[0]
    assert (described.stored_as and described.stored_as.startswith(form.split(",")[0])) or "FP8" in card


@pytest.mark.parametrize("form", [*FORMS, MXFP4])
def test_its_artifact_is_validated(form: str, source_in: Any, recipe: Path, tmp_path: Path) -> None:
    source = source_in(form)
    quantize(source, recipe, tmp_path / "artifact", progress=False)
    verdict = validate(
        tmp_path / "artifact",
        m=(1, 2),
        input_len=16,
        output_len=8,
        quality_tokens=1024,
        max_blocks=6,
        device="cpu",
        progress=False,
    )
    status = {check.name: check.status for check in verdict.checks}
    # Random weights predict no text, so that little of it is left to judge their quality by.
    judged = ["weights", "loads", "tokenizer and templates", *([] if form == MXFP4 else ["quality"])]
    assert [status[name] for name in judged] == ["pass"] * len(judged)
    assert verdict.baseline.stored_as is not None and verdict.baseline.quantization == "none"
    assert not any("itself quantized" in reason for reason in verdict.exploratory)
