"""What a model writes to be calibrated on is drawn from its own distribution."""

import math
from functools import partial

import pytest
import torch
from scalegate.base.progress import progress_bar
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.skeleton import model_config
from scalegate.pipeline.quantization.calibration import self_calibration
from scalegate.pipeline.quantization.calibration.graph_sampler import GraphSampler
from scalegate.pipeline.quantization.calibration.self_calibration import (
    AT_ONCE,
    _draw,
    sample_sequences,
    sequences_at_once,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

COUNT, LENGTH = 6, 24
SIZES = {
    "vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
WITH_STATES = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "block_size": 16,
        "num_local_experts": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip
"""The cache has another name among the arguments of Mamba, and is of another class in MiniMax."""


def peaked_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, vocab_size=48, bos_token_id=1, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def model_with_states(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **WITH_STATES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.normal_(0.0, 2.0 / parameter.shape[1] ** 0.5)
    return model


MODELS = {"attention": peaked_model} | {
    model_type: partial(model_with_states, model_type) for model_type in WITH_STATES
}


def drawn(model: PreTrainedModel, seed: int, recorded: GraphSampler | None = None) -> torch.Tensor:
    with progress_bar(total=COUNT * LENGTH, desc="drawing", unit="tok", shown=False) as bar:
        return _draw(model, COUNT, LENGTH, torch.Generator().manual_seed(seed), bar, recorded)


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_that_the_whole_model_gives_at_the_same_chances(kind: str):
    model, generator = MODELS[kind](), torch.Generator().manual_seed(7)
    ids = torch.ones(COUNT, 1, dtype=torch.int64)
    with torch.inference_mode():
        while ids.shape[1] < LENGTH:
            reached = model(ids, use_cache=False).logits[:, -1].softmax(-1).cumsum(-1)
            chance = torch.rand(COUNT, 1, generator=generator) * reached[:, -1:]
            ids = torch.cat([ids, (reached <= chance).sum(1, keepdim=True)], 1)
    assert torch.equal(drawn(model, 7), ids)
    assert not torch.equal(drawn(model, 8), ids)


def test_a_step_that_can_be_recorded_draws_the_same_tokens_again_and_again():
    model = peaked_model()
    assert GraphSampler.can_record(model)
    recorded = GraphSampler(model, COUNT, LENGTH)
    with torch.inference_mode():
        recorded.step()
    assert recorded.attended == recorded.layers == 3
    # The second time, keys of the first lie beyond the position.
    for seed in (7, 8):
        assert torch.equal(drawn(model, seed, recorded), drawn(model, seed))


def test_a_step_that_waits_for_its_numbers_is_not_recorded():
    model = peaked_model()
    model.config.num_experts = 4
    assert not GraphSampler.can_record(model)
    model.config.num_experts = 0
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    model.config.sliding_window = 4
    assert not GraphSampler.can_record(model)


@pytest.fixture
def too_large(monkeypatch):
    """Every model is, to write in 16 bits."""
    monkeypatch.setitem(self_calibration.LARGEST_PLAIN, "cpu", 0)


def test_a_model_too_large_in_16_bits_writes_with_its_linears_in_int4(
    too_large, example_checkpoint, monkeypatch, tmp_path
):
    models = []

    def loading(*args, **options):
        models.append(load_model(*args, **options))
        return models[-1]

    monkeypatch.setattr(self_calibration, "load_model", loading)
    checkpoint, device = open_checkpoint(example_checkpoint), torch.device("cpu")
    kept = tmp_path / "kept" / "drawn.safetensors"
    drawn = [sample_sequences(checkpoint, (4, 24), device, kept, progress=False) for _ in range(2)]
    assert torch.equal(*drawn) and len(models) == 1
    plain = load_model(example_checkpoint, progress=False).model
    linears = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    left = [name for name, module in models[0].model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) > 4 and left == ["lm_head"]
    with torch.inference_mode():
        chances = plain(drawn[0]).logits.float().log_softmax(-1)[:, :-1]
    nats = -chances.gather(-1, drawn[0][:, 1:, None]).mean()
    # What a model writes is as likely to it as its entropy says; tokens at random are far from that.
    assert nats < 0.6 * math.log(chances.shape[-1])


def test_states_of_sequences_drawn_side_by_side_are_bounded(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}
    config = AutoConfig.for_model("mamba2", **sizes, num_hidden_layers=1, vocab_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    checkpoint, device = open_checkpoint(tmp_path), torch.device("cpu")
    assert sequences_at_once(checkpoint, 512, device) == AT_ONCE
    # A matrix for each head, and the last 3 inputs of the channels that the convolution takes.
    of_one = 4 * (8 * 16 * 16 + 3 * (8 * 16 + 2 * 2 * 16))
    monkeypatch.setitem(self_calibration.KV_BYTES, "cpu", 3 * of_one)
    assert sequences_at_once(checkpoint, 512, device) == 3


def test_keys_and_values_of_sequences_drawn_side_by_side_are_bounded(example_checkpoint, monkeypatch):
    checkpoint, device = open_checkpoint(example_checkpoint), torch.device("cpu")
    assert sequences_at_once(checkpoint, 512, device) == AT_ONCE
    config = model_config(checkpoint)
    of_one = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 512
    monkeypatch.setitem(self_calibration.KV_BYTES, "cpu", 3 * of_one + 1)
    assert sequences_at_once(checkpoint, 512, device) == 3
    monkeypatch.setitem(self_calibration.KV_BYTES, "cpu", 1)
    assert sequences_at_once(checkpoint, 512, device) == 1
