"""Quality of models too large for memory: the figures of whole models, with one layer in memory at a time."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.weight_loader import WeightLoader
from scalegate.pipeline.quantize import quantize
from scalegate.pipeline.validation import by_layers
from scalegate.pipeline.validation.by_layers import ReadByLayers
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.quality import compare, continuation_nats, greedy_gaps


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("by-layers") / "artifact"
    quantize(example_checkpoint, "int4-hqq", out, device="cpu", progress=False)
    return out


def windows(*lengths: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(0, 8192, (length,), generator=drawn) for length in lengths]


def read(folder: Path, texts: list[torch.Tensor]) -> ReadByLayers:
    return ReadByLayers(open_checkpoint(folder), texts, "cpu", progress=False)


def test_the_figures_are_those_of_the_whole_models(artifact: Path, example_checkpoint: Path):
    texts = windows(64, 64, 40)
    found = compare(read(artifact, texts), read(example_checkpoint, texts), texts)
    whole = [load_model(each, device="cpu", progress=False).model for each in (artifact, example_checkpoint)]
    expected = compare(*whole, texts)
    assert found.tokens == expected.tokens
    assert found.baseline_nats_per_token == pytest.approx(expected.baseline_nats_per_token, abs=2e-3)
    assert found.nats_per_token == pytest.approx(expected.nats_per_token, abs=2e-2)
    assert found.mean_kl == pytest.approx(expected.mean_kl, rel=0.1)
    assert expected.mean_kl > 0.01, "there is something to see"


def test_answers_are_scored_as_by_the_whole_model(example_checkpoint: Path):
    model = load_model(example_checkpoint, device="cpu", progress=False).model
    texts = windows(48, 30)
    reader = read(example_checkpoint, texts)
    for text in texts:
        prompt, answer = text[:20].tolist(), text[20:].tolist()
        expected = continuation_nats(model, prompt, answer)
        assert continuation_nats(reader, prompt, answer) == pytest.approx(expected, rel=5e-3)
        assert greedy_gaps(reader, prompt, answer) == pytest.approx(
            greedy_gaps(model, prompt, answer), abs=0.3
        )


def test_one_layer_is_in_memory_at_a_time(artifact: Path, monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    place = WeightLoader.place_plain

    def counted(self, assignment, reader=None):
        place(self, assignment, reader)
        layers = {
            name.split(".layers.")[1].split(".")[0]
            for name, weight in self.model.named_parameters()
            if ".layers." in name and weight.device.type != "meta"
        }
        held.append(len(layers))

    monkeypatch.setattr(WeightLoader, "place_plain", counted)
    read(artifact, windows(16))
    gc.collect()
    assert len(held) > 20
    assert max(held) == 1


def test_memory_decides_and_our_own_server_never_asks(
    artifact: Path, example_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    sides = {"artifact": open_checkpoint(artifact), "baseline": open_checkpoint(example_checkpoint)}
    options = EngineOptions(device="cpu")
    elsewhere = SimpleNamespace(engine="vllm", baseline_engine="vllm", options=options, **sides)
    here = SimpleNamespace(engine="embedded", baseline_engine="embedded", options=options, **sides)
    assert not by_layers.needs_layers(elsewhere)
    monkeypatch.setattr(by_layers, "free_bytes", lambda device: 4 << 30)
    assert by_layers.needs_layers(elsewhere)
    assert not by_layers.needs_layers(here)
