"""The sound artifacts that the zoo's faults are made of, and what their files and their text show of them."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4 as NVFP4Format
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import MANIFEST_NAME, Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.validation.in_process import figures_of, load_models
from scalegate.pipeline.validation.known_text import read_known
from scalegate.pipeline.validation.other_readers import misreadings
from scalegate.pipeline.validation.run import LoadOptions
from scalegate.pipeline.validation.text_files import compare_text_files
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.other_readers import check_other_readers
from scalegate.serving_check.checks.quality import check_quality
from scalegate.serving_check.checks.text_files import check_text_files
from scalegate.serving_check.checks.weights import check_weights, largest_errors
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.evidence.artifact_figures import ReaderFigures, TextFigures
from scalegate.serving_check.evidence.verdict import CheckResult
from scalegate.serving_check.settings import Bounds
from transformers import AutoConfig, AutoModelForCausalLM

from .artifacts import EXPERTS, INT4, NVFP4

EXPERTS_CONFIG = {
    "vocab_size": 8192, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "max_position_embeddings": 512, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Sound:
    """A sound artifact beside the checkpoint that it was made from."""

    artifact: Path
    baseline: Path

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.artifact, folder))


def make_sound(example: Path, work: Path) -> dict[str, Sound]:
    """One of each kind that the faults are of: INT4 and NVFP4 of the bundled checkpoint, tiny experts."""
    experts = _random_experts(work / "experts-source", example)
    made = {}
    for kind, source, spec in (
        (INT4, example, Int4(128)),
        (NVFP4, example, NVFP4Format()),
        (EXPERTS, experts, Int4(16)),
    ):
        quantize(source, Recipe(kind, spec=spec), work / kind, progress=False)
        made[kind] = Sound(work / kind, source)
    return made


def _random_experts(folder: Path, tokenizer_of: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **EXPERTS_CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_of / name, folder / name)
    return folder


def judge_files(folder: Path, baseline: Path) -> dict[str, CheckResult]:
    """The checks that need neither a model nor a server, by name."""
    artifact, source = open_checkpoint(folder), open_checkpoint(baseline)
    manifest = Artifact.read(folder) if (folder / MANIFEST_NAME).is_file() else None
    declared = manifest.declared_changes() if manifest else ()
    results = (
        check_weights(compare_weights(artifact, source, manifest, progress=False).figures),
        check_text_files(TextFigures(compare_text_files(artifact, source), declared)),
        check_other_readers(ReaderFigures(misreadings(artifact))),
    )
    return {result.name: result for result in results}


def judge_quality(folder: Path, baseline: Path, tokens: int) -> CheckResult:
    """The quality check on `tokens` tokens of the bundled text, on the CPU."""
    artifact, source = open_checkpoint(folder), open_checkpoint(baseline)
    engine = EngineOptions(device="cpu", dtype="float32")
    options = LoadOptions(engine, engine.dtype, progress=False)
    models = load_models(artifact, source, options)
    text = read_known(models.theirs.model, artifact, source, tokens)
    comparison = figures_of(models, text, options).comparison
    weights = compare_weights(artifact, source, None, progress=False)
    return check_quality(comparison, Bounds(), largest_errors(weights.figures))
