"""The engine's KV formats on the CPU: tokens are those of a model that sees its keys and values as stored.

The reference rounds keys and values inside transformers' own attention, with no cache, pages or engine.
"""

import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.attention.append_kv import quantize_reference
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import KVScales, KVShape
from scalegate.serving_check.engine import kv_pool
from scalegate.serving_check.engine.attention import AttentionLayer
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
}
CONFIGS = {"qwen3": Qwen3Config(**SIZES), "window": MistralConfig(**SIZES, sliding_window=24)}
LENGTHS = (1, 2, 7, 16, 23, 33, 48, 61)
NEW_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SCALES = {
    0: KVScales(torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.01])),
    1: KVScales(torch.tensor([0.04]), torch.tensor([0.02])),
}
FORMATS = {"fp8": SCALES, "int8_per_token_head": {}}


@dataclass
class RoundedCache:
    """Keys and values as a format stores them, [B, H_kv, T, D]."""

    name: str
    scales: dict[int, KVScales]

    def __call__(self, layer: int, new: torch.Tensor, of: str) -> torch.Tensor:
        dtype = {"fp8": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}[self.name]
        scale = torch.ones(new.shape[1])
        if self.name == "fp8" and layer in self.scales:
            scale = scale * getattr(self.scales[layer], of)
        stored, token_scale = quantize_reference(new.transpose(1, 2), dtype, scale)
        by = scale if token_scale is None else token_scale
        return (stored.float() * by.unsqueeze(-1)).transpose(1, 2)


def rounded_attention(module, query, key, value, attention_mask, **options):
    rounded = module.config.rounded_kv
    key, value = rounded(module.layer_idx, key, "key"), rounded(module.layer_idx, value, "value")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)


AttentionInterface.register("rounded_kv", rounded_attention)
AttentionMaskInterface.register("rounded_kv", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def lively_model(config) -> PreTrainedModel:
    """Random weights large enough that outputs neither repeat nor settle."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_vector = parameter.ndim == 1
            parameter.normal_(0.0, 0.5 if is_vector else 0.3)
            if is_vector and "norm" in name:
                parameter.add_(1.0)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS * 2]


def expected(model: PreTrainedModel, name: str, scales: dict[int, KVScales]) -> list[tuple[int, ...]]:
    model = copy.deepcopy(model)
    model.config.rounded_kv = RoundedCache(name, scales)
    model.set_attn_implementation("rounded_kv")
    rows = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
        rows.append(tuple(tokens[len(prompt) :]))
    return rows


def make_engine(model: PreTrainedModel, name: str, scales=None, **sizes) -> Engine:
    config = EngineOptions(kv_cache_dtype=name, **{"prefill_chunk": 40, "max_num_seqs": 16, **sizes})
    return Engine(copy.deepcopy(model), config, frozenset(), scales)


def served(engine: Engine) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in engine.generate(prompts(), GREEDY)]


@pytest.mark.parametrize(
    ("architecture", "name"),
    exhaustive_but(product(CONFIGS, FORMATS), ("window", "fp8")),
)
def test_tokens_are_those_over_the_stored_values_batched_alone_and_preempted(architecture: str, name: str):
    model, scales = lively_model(CONFIGS[architecture]), FORMATS[name]
    want = expected(model, name, scales)
    assert len(set(want)) == len(want) and len(set(want[0])) > NEW_TOKENS // 3, "too dull to prove it"

    engine = make_engine(model, name, scales)
    assert served(engine) == want
    assert served(engine) == want, "pages that others used before"
    assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts()[:8]] == want[:8]

    tight = make_engine(model, name, scales, kv_cache_tokens=112, max_model_len=96)
    assert served(tight) == want
    assert tight.stats().preemptions > 3 and tight.pool.free_pages == tight.pool.num_pages


def test_the_formats_and_their_scales_matter_so_ignoring_them_would_be_noticed():
    model = lively_model(CONFIGS["qwen3"])
    engines = [
        make_engine(model, "unquantized"),
        make_engine(model, "fp8"),
        make_engine(model, "fp8", SCALES),
        make_engine(model, "int8_per_token_head"),
    ]
    answers = [tuple(served(engine)) for engine in engines]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("name", FORMATS)
def test_an_abort_leaves_the_neighbours_tokens_alone(name: str):
    model, scales = lively_model(CONFIGS["qwen3"]), FORMATS[name]
    engine = make_engine(model, name, scales)
    want = served(engine)
    for index, prompt in enumerate(prompts()):
        engine.add_request(str(index), prompt, GREEDY)
    tokens: dict[str, list[int]] = {}
    for step in range(1000):
        if step in (2, 5, 9):
            engine.abort(str(step))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if not engine.has_work:
            break
    assert {index: tuple(tokens[str(index)]) for index in range(16) if index not in (2, 5, 9)} == {
        index: row for index, row in enumerate(want) if index not in (2, 5, 9)
    }
    assert engine.pool.free_pages == engine.pool.num_pages


def test_eight_bits_hold_about_twice_the_tokens(monkeypatch: pytest.MonkeyPatch):
    shape = KVShape(8, 128, 128, torch.bfloat16, 32)
    names = ("unquantized", *FORMATS)
    pages = [KV_FORMATS[name].bytes_per_page(shape, 16) for name in names]
    assert pages == [16 * 4096, 16 * 2048, 16 * 2112]
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 1 << 30)
    layers = {0: AttentionLayer(shape, AttentionOptions(1.0))}
    sizes = [
        kv_pool.pool_pages(layers, KV_FORMATS[name], 16, None, 1 << 20, 4096, torch.device("cpu"))
        for name in names
    ]
    assert sizes[1] == 2 * sizes[0] and sizes[2] > 1.9 * sizes[0]


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int3'; choose one of: auto, unquantized,"):
        make_engine(lively_model(CONFIGS["qwen3"]), "int3")
