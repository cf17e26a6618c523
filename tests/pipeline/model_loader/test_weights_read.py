"""Layers whose weight a model reads without calling them stay as they are, and the artifact can be served."""

import json
from pathlib import Path

import torch
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.weights_read import multiplies, reads_weight
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

DEEPSEEK_V4 = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 32, "n_routed_experts": 2, "num_experts_per_tok": 1, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


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


def test_a_layer_that_multiplies_each_group_of_inputs_by_rows_of_its_own_stays(tmp_path: Path):
    config = AutoConfig.for_model("deepseek_v4", **DEEPSEEK_V4)
    source, artifact = tmp_path / "source", tmp_path / "artifact"
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.save_pretrained(source)
    grouped = plain.model.layers[0].self_attn.o_a_proj
    assert not multiplies(grouped) and multiplies(plain.model.layers[0].self_attn.o_b_proj)
    assert multiplies(FalconLinear(4, 8))
    quantize(str(source), "int4-hqq-g32", out=artifact, progress=False)
    ignored = json.loads((artifact / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.o_a_proj" in ignored
    model = load_model(artifact, progress=False).model
    assert type(model.model.layers[0].self_attn.o_a_proj) is type(grouped)
    assert type(model.model.layers[0].self_attn.o_b_proj) is not type(plain.lm_head)
    with torch.inference_mode():
        logits = model(torch.arange(3, 24)[None], use_cache=False).logits
    assert logits.isfinite().all()


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
