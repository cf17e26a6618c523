"""Learned rounding: a layer's outputs get nearer, or its weights stay what GPTQ made of them."""

from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader import layer_stream
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization import job_calibration
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.quantization.calibration.calibration_names import CALIBRATION, LEARNED
from scalegate.pipeline.quantization.calibration.calibration_text import read_calibration_text
from scalegate.pipeline.quantization.quantizers.all_quantizers import QUANTIZERS
from scalegate.pipeline.quantization.quantizers.quantizer import CorrectingQuantizer
from scalegate.pipeline.quantization.solvers import learned_rounding
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_fields import AWQ, GPTQ
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.tests.exhaustive import exhaustive_but
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 40)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    monkeypatch.setattr(layer_stream, "SEQUENCES_AT_ONCE", 5)
    # The text alone: what the model writes beside it would be as many sequences again.
    monkeypatch.setattr(job_calibration, "can_draw", lambda *_: False)


def recipe(spec: WeightFormat, steps: int) -> Recipe:
    return Recipe("learned", spec=spec, method=GPTQ, learned_rounding=steps)


def make(source: Path, asked: Recipe, out: Path, text: Path) -> Artifact:
    return quantize(source, asked, out, calibration=text, device="cpu", progress=False)


def weights(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name).view(torch.uint8).numpy().tobytes() for name in checkpoint.tensors}


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, progress=False).model(tokens).logits.float()


def test_a_layer_s_outputs_get_nearer(two_layers: Path, heldout_text: Path, tmp_path: Path) -> None:
    layer = ("model.layers.0.*",)
    plain = Recipe("plain", spec=Int4(64), method=AWQ, include=layer)
    learned = Recipe("learned", spec=Int4(64), method=AWQ, include=layer, learned_rounding=24)
    artifacts = [make(two_layers, asked, tmp_path / asked.name, heldout_text) for asked in (plain, learned)]
    assert LEARNED not in artifacts[0].quantization[CALIBRATION]
    (errors,) = artifacts[1].quantization[CALIBRATION][LEARNED].values()
    assert errors["after"] < 0.9 * errors["before"]
    tokens = read_calibration_text(open_checkpoint(two_layers), str(heldout_text)).sequences
    assert tokens is not None
    expected = logits(two_layers, tokens[-6:])
    far = [
        float((logits(tmp_path / artifact.recipe["name"], tokens[-6:]) - expected).norm())
        for artifact in artifacts
    ]
    assert far[1] < far[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, example_checkpoint: Path) -> Path:
    """A random mixture of experts with one narrow layer, and the bundled checkpoint's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 128}
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes, vocab_size=8192, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_hidden_layers=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((example_checkpoint / name).read_bytes())
    return folder


@pytest.mark.parametrize(
    "spec", exhaustive_but([Int4(64), NVFP4(), MXFP4()], Int4(64)), ids=lambda spec: spec.name
)
def test_every_weight_of_a_layer_takes_part_experts_too(
    small: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: WeightFormat
) -> None:
    make(small, recipe(spec, 0), tmp_path / "gptq", heldout_text)
    # However bad it is, it is taken: so what was learned is to be seen.
    losses = iter(range(9, 0, -1))
    monkeypatch.setattr(learned_rounding._Layer, "loss", lambda *_: next(losses))
    monkeypatch.setattr(learned_rounding, "POSITION_RATE", 0.2)
    artifact = make(small, recipe(spec, 4), tmp_path / "learned", heldout_text)
    before, after = weights(tmp_path / "gptq"), weights(tmp_path / "learned")
    modules = artifact.quantization["modules"]
    assert sum(".experts." in name for name in modules) == 12
    for module in modules:
        assert any(before[name] != after[name] for name in before if name.startswith(f"{module}.")), module


def test_what_is_not_better_is_not_taken(
    small: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(small, recipe(Int4(64), 0), tmp_path / "gptq", heldout_text)
    monkeypatch.setattr(learned_rounding, "FACTOR_RATE", 100.0)
    artifact = make(small, recipe(Int4(64), 4), tmp_path / "wild", heldout_text)
    (errors,) = artifact.quantization[CALIBRATION][LEARNED].values()
    assert errors["after"] == errors["before"] > 0
    assert weights(tmp_path / "wild") == weights(tmp_path / "gptq")


@pytest.mark.parametrize(
    ("sequences", "learns"), exhaustive_but([(4, True), (2, True), (1, False)], (2, True), (1, False))
)
def test_a_short_text_is_learned_from_or_named(
    small: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], sequences: int, learns: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(calibration_text, "SEQUENCES", sequences)
    artifact = quantize(small, recipe(Int4(64), 2), tmp_path / "out", calibration=heldout_text, device="cpu")
    facts = artifact.quantization[CALIBRATION]
    assert facts["text"] == sequences
    assert len(facts[LEARNED]) == (1 if learns else 0)
    assert ("no rounding was learned" in capsys.readouterr().err) != learns


@pytest.mark.parametrize(
    "spec", [Int4(32), Int4(32, symmetric=True), Int8(32), NVFP4(), MXFP4(), FP8()], ids=lambda spec: spec.key
)
def test_levels_are_those_of_the_weight(spec: WeightFormat) -> None:
    quantizer = QUANTIZERS[spec.name]
    assert isinstance(quantizer, CorrectingQuantizer)
    torch.manual_seed(0)
    weight = spec.random(8, 96, torch.device("cpu"))
    values = weight.dequantize(torch.float32)
    levels = quantizer.levels(weight)
    ones = torch.ones(8, levels.groups)
    assert torch.equal(levels.values(levels.chosen, ones), values)
    assert torch.equal(levels.weight(levels.chosen, ones).dequantize(torch.float32), values)
    assert torch.allclose(levels.positions(values), levels.chosen, atol=1e-4)
    up = (levels.chosen + 1).clamp(max=levels.top)
    between = (values + levels.values(up, ones)) / 2
    assert torch.allclose(levels.positions(between), (levels.chosen + up) / 2, atol=1e-4)
    moved = levels.weight(up, ones * 1.25)
    assert torch.equal(moved.dequantize(torch.float32), levels.values(up, ones * 1.25))


def test_it_goes_on_from_a_method_s_solution(example_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="starts from weights that a method has rounded"):
        make(example_checkpoint, Recipe("no", learned_rounding=5), tmp_path / "out", tmp_path)
    (tmp_path / "wrong.yaml").write_text("method: gptq\nlearned_rounding: often\n")
    with pytest.raises(UserError, match=r"line 2: `learned_rounding` is a number of steps up to 100000"):
        load_recipe(tmp_path / "wrong.yaml")


def test_shipped_recipes_learn() -> None:
    best = ("int4-best", "nvfp4-best", "mxfp4-best")
    steps = {name: load_recipe(name).learned_rounding for name in (*best, "int4-gptq")}
    assert all(steps[name] > 0 for name in best)
    assert steps["int4-gptq"] == 0
