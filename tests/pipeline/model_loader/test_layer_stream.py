"""A model that runs one layer after another, whatever its layers return, gives what the whole model gives."""

from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader import layer_stream
from scalegate.pipeline.model_loader.layer_stream import LayerStream
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
KINDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "mamba": {"time_step_rank": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
}
"""Their layers return hidden states; those and attention weights, of which both or the first are taken. The
classes around Mamba's decoders read other fields of its output."""
CPU = torch.device("cpu")


def saved(kind: str, folder: Path) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_layers_one_by_one_are_the_model(kind: str, count: int, tmp_path: Path):
    model, sequences = saved(kind, tmp_path), torch.randint(64, (count, 9))
    stream = LayerStream(open_checkpoint(tmp_path), sequences, CPU)
    for name in stream.layers:
        stream.place(name)
        stream.advance(name)
        stream.drop(name)
    with torch.inference_mode():
        expected = model.get_decoder()(sequences, use_cache=False)[0]
        logits = model(sequences, use_cache=False).logits
        found = torch.cat(list(stream.outputs()))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(stream.predictions(found), logits)


def test_layers_that_return_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("bamba", tmp_path)
    monkeypatch.setattr(layer_stream, "OUTPUT_FORMS", layer_stream.OUTPUT_FORMS[:1])
    with pytest.raises(UserError, match="the layers of BambaForCausalLM cannot be calibrated one by one"):
        LayerStream(open_checkpoint(tmp_path), torch.randint(64, (1, 9)), CPU)
