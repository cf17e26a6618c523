"""Layers whose weight a model reads without calling them stay as they are, and the artifact can be served."""

import json
from pathlib import Path

import torch
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.weights_read import reads_weight
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from torch import nn


class WeightReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.asked, self.trained = (nn.Linear(4, 4) for _ in range(4))
        nn.init.zeros_(self.asked.weight)

    def forward(self, x):
        if self.training:
            return x @ self.trained.weight
        return self.called(x).to(self.asked.weight.dtype) @ self.read.weight.T


def test_only_numbers_read_while_serving_count():
    names = [name for name, _ in WeightReader().named_children() if reads_weight(WeightReader(), name)]
    assert names == ["read"]


def test_mamba_s_step_sizes_stay_and_the_artifact_computes(tmp_path: Path):
    source = make_text(tmp_path / "source", "jamba")
    artifact = tmp_path / "artifact"
    quantize(str(source), "int4-hqq-g32", out=artifact, progress=False)
    config = json.loads((artifact / "config.json").read_text())
    assert "model.layers.0.mamba.dt_proj" in config["quantization_config"]["ignore"]
    model = load_model(artifact, progress=False).model
    assert type(model.model.layers[0].mamba.dt_proj) is nn.Linear
    assert type(model.model.layers[0].mamba.in_proj) is not nn.Linear
    with torch.inference_mode():
        logits = model(torch.arange(3, 9)[None], use_cache=False).logits
    assert logits.isfinite().all()
