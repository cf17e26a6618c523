"""What a model writes to be calibrated on is drawn from its own distribution."""

import torch
from scalegate.layouts.progress import progress_bar
from scalegate.pipeline.quantization.self_calibration import _draw
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

COUNT, LENGTH = 6, 24


def peaked_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, vocab_size=48, bos_token_id=1, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def drawn(model: PreTrainedModel, seed: int) -> torch.Tensor:
    with progress_bar(total=COUNT * LENGTH, desc="drawing", unit="tok", shown=False) as bar:
        return _draw(model, COUNT, LENGTH, torch.Generator().manual_seed(seed), bar)


def test_tokens_are_those_that_the_whole_model_gives_at_the_same_chances():
    model, generator = peaked_model(), torch.Generator().manual_seed(7)
    ids = torch.ones(COUNT, 1, dtype=torch.int64)
    with torch.inference_mode():
        while ids.shape[1] < LENGTH:
            reached = model(ids, use_cache=False).logits[:, -1].softmax(-1).cumsum(-1)
            chance = torch.rand(COUNT, 1, generator=generator) * reached[:, -1:]
            ids = torch.cat([ids, (reached <= chance).sum(1, keepdim=True)], 1)
    assert torch.equal(drawn(model, 7), ids)
    assert not torch.equal(drawn(model, 8), ids)
