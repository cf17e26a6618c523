"""What quality is measured on for a KV format: keys and values as decoding finds them, not as prompts do."""

import copy
from collections.abc import Iterator

import pytest
import torch
from scalegate.layouts.kv.format import KV_FORMATS, TokenByToken
from scalegate.serving_check.engine.offline.stored_kv import StoredKVModel
from scalegate.serving_check.quality import compare
from scalegate.tests.registered import registered
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

TOKENS, PROMPT = 40, 21
COARSE = 0.5


class UnlessPrompt:
    """One layer's storage whose prompts attend over keys as they are, and whose stored keys are coarse."""

    def __init__(self, exact, coarse):
        self.exact, self.coarse = exact, coarse

    def forward(self, query, key, value, metadata, options, sinks):
        exact = self.exact.forward(query, key, value, metadata, options, sinks)
        rounded = (key / COARSE).round() * COARSE
        coarse = self.coarse.forward(query, rounded, value, metadata, options, sinks)
        return exact if metadata.host.num_prefills else coarse


class CoarseOnceStored(TokenByToken):
    def allocate(self, *arguments):
        return UnlessPrompt(super().allocate(*arguments), super().allocate(*arguments))


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


@pytest.fixture
def coarse() -> Iterator[str]:
    with registered(KV_FORMATS, "coarse_once_stored", CoarseOnceStored()):
        yield "coarse_once_stored"


def logits(model: PreTrainedModel, kv_format: str, ids: torch.Tensor, keep: int) -> torch.Tensor:
    stored = StoredKVModel(copy.deepcopy(model), kv_format, {}, TOKENS, batch=len(ids))
    with torch.inference_mode():
        first = stored(input_ids=ids, logits_to_keep=keep).logits
        assert torch.equal(first, stored(input_ids=ids, logits_to_keep=keep).logits), "pages used before"
    assert stored.pool.free_pages == stored.pool.num_pages
    return first


def test_decoded_texts_are_what_the_model_says_of_them(model: PreTrainedModel):
    ids = torch.randint(0, 64, (3, TOKENS))
    kept = TOKENS - PROMPT + 1
    with torch.inference_mode():
        want = model(ids, logits_to_keep=kept).logits
    torch.testing.assert_close(logits(model, "unquantized", ids, kept), want, rtol=1e-4, atol=1e-4)
    decoded = logits(model, "int8_per_token_head", ids, kept)
    read = logits(model, "int8_per_token_head", ids, 0)[:, -kept:]
    torch.testing.assert_close(decoded, read, rtol=1e-4, atol=1e-4)
    assert (decoded - want).abs().max() > 1e-3, "eight bits change nothing"


def test_what_a_prompt_attends_over_unquantized_is_seen_in_decoding(model: PreTrainedModel, coarse: str):
    windows = [torch.randint(0, 64, (TOKENS,)) for _ in range(5)]

    def measured(kv_format: str, **how):
        stored = StoredKVModel(copy.deepcopy(model), kv_format, {}, TOKENS, batch=2)
        return compare(stored, model, windows, **how)

    assert measured(coarse, batch=2).mean_kl < 1e-6, "read as prompts, nothing is seen of it"
    decoded = measured(coarse, second_half=True, batch=2)
    assert decoded.mean_kl > 0.01 and decoded.tokens == 5 * TOKENS // 2
    assert measured(coarse, second_half=True).mean_kl == pytest.approx(decoded.mean_kl, rel=1e-4)
    exact = measured("unquantized", second_half=True, batch=2)
    assert exact.mean_kl < 1e-6 and exact.tokens == decoded.tokens


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_continuations_of_any_lengths_are_decoded_together(model: PreTrainedModel, batch: int):
    ids = torch.randint(0, 64, (4, TOKENS))
    lengths = [(PROMPT, 9), (30, 10), (5, 1), (12, 28)]
    stored = StoredKVModel(copy.deepcopy(model), "int8_per_token_head", {}, TOKENS, batch=batch)
    texts = [
        (row[:prompt].tolist(), row[prompt : prompt + followed].tolist())
        for row, (prompt, followed) in zip(ids, lengths, strict=True)
    ]
    found = list(stored.continuations(texts))
    assert stored.pool.free_pages == stored.pool.num_pages
    for logits_found, row, (prompt, followed) in zip(found, ids, lengths, strict=True):
        with torch.inference_mode():
            alone = stored(row[None, : prompt + followed], logits_to_keep=followed + 1).logits[0, :-1]
        torch.testing.assert_close(logits_found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["unquantized", "int4_per_token_head", "kvarn_k4v2_g128"])
def test_a_graph_decodes_what_its_layers_decode(kv_format: str):
    """Two batches of three and one of two: pages are written in prompts and in steps, and used again."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()
    tokens, kept = 600, 300
    replayed = StoredKVModel(copy.deepcopy(model), kv_format, {}, tokens, batch=3)
    launched = StoredKVModel(copy.deepcopy(model), kv_format, {}, tokens, batch=3)
    assert replayed._graphs is not None
    launched._graphs = None
    for count in (3, 3, 2):
        ids = torch.randint(0, 512, (count, tokens), device="cuda")
        with torch.inference_mode():
            ours, theirs = (side(input_ids=ids, logits_to_keep=kept).logits for side in (replayed, launched))
        assert torch.equal(ours, theirs) and ours.isfinite().all()
        assert not torch.equal(ours[:, -1], ours[:, -2]), "each step has an answer of its own"
    assert len(replayed._graphs.captured) == 2
