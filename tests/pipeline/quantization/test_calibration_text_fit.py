"""A calibration text of the wrong kind: named, and kept from harm by what the model writes beside it."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.layer_stream import LayerStream
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.publishing.card_phrases import calibration_phrase
from scalegate.pipeline.quantization import job_calibration
from scalegate.pipeline.quantization.calibration import calibration_text, text_fit
from scalegate.pipeline.quantization.calibration.calibration_needs import CalibrationNeeds
from scalegate.pipeline.quantization.calibration.calibration_text import (
    CalibrationText,
    read_calibration_text,
)
from scalegate.pipeline.quantization.calibration.self_calibration import beside
from scalegate.pipeline.quantization.job_calibration import CalibrationContext
from scalegate.pipeline.quantization.shards.tasks import WeightTask
from scalegate.pipeline.quantization.shards.weight_tensors import WeightQuantizer
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_fields import GPTQ

RECIPE = Recipe("mlp", spec=Int4(128), method=GPTQ, include=("*.down_proj",))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 24)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 128)


@pytest.fixture
def random_text(tmp_path: Path) -> Path:
    letters = torch.randint(33, 127, (12000,), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "random.txt"
    path.write_text("".join(map(chr, letters)))
    return path


def test_one_of_each_kind_in_turn():
    text, own = torch.arange(10)[:, None], torch.full((3, 1), -1)
    assert beside(text, own).flatten().tolist() == [0, -1, 4, -1, 9, -1]


@pytest.mark.exhaustive
def test_random_bytes_are_named_and_do_no_harm(
    example_checkpoint: Path, heldout_text: Path, random_text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tokens = read_calibration_text(open_checkpoint(example_checkpoint), str(heldout_text)).sequences
    assert tokens is not None

    def logits(folder: Path) -> torch.Tensor:
        with torch.inference_mode():
            return load_model(folder, progress=False).model(tokens[-12:]).logits.float()

    expected = logits(example_checkpoint)

    def distance(name: str, recipe: Recipe, text: Path | None) -> tuple[float, dict, str]:
        made = quantize(example_checkpoint, recipe, tmp_path / name, calibration=text, device="cpu")
        found = float((logits(tmp_path / name) - expected).norm())
        return found, made.quantization.get("calibration", {}), capsys.readouterr().err

    plain, nothing, _ = distance("plain", Recipe("plain", spec=Int4(128), include=RECIPE.include), None)
    assert nothing == {}
    guarded, facts, said = distance("guarded", RECIPE, random_text)
    assert guarded < plain
    assert (facts["text"], facts["own"], facts["fits"]) == (24, 24, False)
    assert facts["nats_per_token"]["text"] > 2 * facts["nats_per_token"]["own"]
    assert "the calibration text does not fit the model" in said
    assert "of a kind that the model does not know" in str(calibration_phrase(facts))
    # The same without what the model writes does harm, so the bound above can fail.
    monkeypatch.setattr(job_calibration, "can_draw", lambda *_: False)
    alone, facts, said = distance("alone", RECIPE, random_text)
    assert alone > plain
    assert facts["own"] == 0 and facts["nats_per_token"]["own"] is None
    assert "does not fit the model" in said and "nothing that it writes is read beside" in said


@pytest.mark.parametrize("steps, alone, beside_text", [(0, 6, 3), (1, 8, 5)])
def test_half_as_many_sequences_are_read_where_no_rounding_is_learned(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    steps: int, alone: int, beside_text: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(job_calibration, "SEQUENCES", 10)
    monkeypatch.setattr(job_calibration, "UNLEARNED_SEQUENCES", 6)
    wanted = CalibrationNeeds(solved={"linear": WeightTask("linear.weight")}, learning_steps=steps)
    quantizer = WeightQuantizer(torch.bfloat16, torch.device("cpu"))
    checkpoint = open_checkpoint(example_checkpoint)

    def read(name: str, sequences: torch.Tensor | None) -> dict:
        text = CalibrationText(name, (8, 16), sequences, {})
        made = job_calibration.calibration_sequences(
            text, wanted, CalibrationContext(checkpoint, quantizer, tmp_path / name, False)
        )
        assert made is not None and len(made.sequences) == made.facts["text"] + made.facts["own"]
        return made.facts

    (tmp_path / "self").mkdir()
    assert read("self", None)["own"] == alone
    assert read("file", torch.arange(8 * 16).view(8, 16))["own"] == beside_text


def test_a_text_of_the_model_s_own_kind_is_not_named(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe("one", spec=Int4(128), method=GPTQ, include=("*.layers.0.mlp.gate_proj",))
    made = quantize(example_checkpoint, recipe, tmp_path / "code", calibration=heldout_text, device="cpu")
    assert made.quantization["calibration"]["fits"]
    assert "does not fit" not in capsys.readouterr().err


def test_a_text_that_was_measured_leaves_no_embeddings_in_memory(
    example_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = []

    def stream(*arguments) -> LayerStream:
        made = LayerStream(*arguments)
        embeddings.append(weakref.ref(made.model.get_input_embeddings().weight))
        assert embeddings[-1]() is not None
        return made

    monkeypatch.setattr(text_fit, "LayerStream", stream)
    sequences = torch.arange(64)[None]
    gc.disable()  # which would come too late for what large embeddings take
    try:
        text_fit.measure_fit(
            open_checkpoint(example_checkpoint), sequences, sequences, 8192, torch.device("cpu")
        )
        assert [embedding() for embedding in embeddings] == [None, None]
    finally:
        gc.enable()
