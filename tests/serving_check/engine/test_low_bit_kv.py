"""Formats below eight bits on the CPU: tokens are those of a model that sees keys and values as stored.

The reference quantizes inside transformers' attention, with the formats' arithmetic but no cache, pages or
steps, and attends one query at a time.
"""

import copy
from itertools import product

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.attention.kvarn import reference as kvarn
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.per_token import int4, nvfp4
from scalegate.kernels.hadamard import rotate_reference
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.layouts.kv.layer import KVScales, KVShape
from scalegate.serving_check.engine import kv_pool
from scalegate.serving_check.engine.attention import AttentionLayer
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.registered import registered
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    PreTrainedModel,
    Qwen3Config,
)

GROUP, DIM = 8, 16
SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES),
    "window and softcap": Gemma2Config(**SIZES, sliding_window=12, attn_logit_softcapping=8.0),
}
LENGTHS = (1, 7, 8, 16, 30, 41)
NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SCALES = {
    0: KVScales(torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.01])),
    1: KVScales(torch.tensor([0.04]), torch.tensor([0.02])),
}
NAMES = ("int4_per_token_head", "nvfp4", "kvarn_k4v2", "kvarn_k4v4")


@pytest.fixture(autouse=True)
def short_pages():
    with (
        registered(KV_FORMATS, "kvarn_k4v2", KVarN(2, GROUP)),
        registered(KV_FORMATS, "kvarn_k4v4", KVarN(4, GROUP)),
    ):
        yield


def stored(
    name: str, layer: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [T, H_kv, D] as pages give them back; KVarN's last, unfinished page as zeros."""
    if name == "nvfp4":
        scales = [torch.ones(2) * scale for scale in (SCALES[layer].key, SCALES[layer].value)]
        sides = zip((key, value), scales, strict=True)
        return tuple(nvfp4.dequantize_reference(nvfp4.quantize_reference(x, by), by) for x, by in sides)
    rotated = rotate_reference(key), rotate_reference(value)
    if name == "int4_per_token_head":
        back = [int4.dequantize_reference(int4.quantize_reference(x)) for x in rotated]
    elif len(key) < GROUP:
        return key, value
    else:
        whole = len(key) // GROUP * GROUP
        tiles = [x[:whole].half().unflatten(0, (-1, GROUP)).transpose(1, 2) for x in rotated]
        read = kvarn.dequantize_reference(kvarn.quantize_reference(*tiles, int(name[-1])))
        back = [torch.zeros_like(key), torch.zeros_like(key)]
        for x, pages in zip(back, read, strict=True):
            x[:whole] = pages.transpose(1, 2).flatten(0, 1)
    return rotate_reference(back[0]), rotate_reference(back[1])


def quantized_attention(module, query, key, value, attention_mask, scaling, **options):
    name, layer, window = module.config.kv_format, module.layer_idx, options.get("sliding_window")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    is_kvarn = name.startswith("kvarn")
    codes = (key, value) if is_kvarn and window else stored(name, layer, key, value)
    outputs = []
    for position, vector in enumerate(query):
        first = 0 if window is None else max(0, position + 1 - window)
        seen = []
        for x, coded in zip((key, value), codes, strict=True):
            coded = coded.clone()
            if is_kvarn and not window:
                own = position // GROUP * GROUP
                coded[:GROUP], coded[own:] = x[:GROUP], x[own:]
            seen.append(coded[first : position + 1].repeat_interleave(2, dim=1))
        scores = torch.einsum("hd,nhd->hn", vector, seen[0]) * scaling
        if options.get("softcap"):
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        outputs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), seen[1]))
    return torch.stack(outputs)[None], None


AttentionInterface.register("quantized_kv", quantized_attention)
AttentionMaskInterface.register("quantized_kv", lambda *arguments, **options: None)


def lively_model(config) -> PreTrainedModel:
    """Random weights large enough that outputs neither repeat nor settle."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5 if parameter.ndim == 1 else 0.3)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def expected(model: PreTrainedModel, name: str) -> list[tuple[int, ...]]:
    """Drawn by one pass a token over the whole text."""
    model = copy.deepcopy(model)
    model.config.kv_format = name
    model.set_attn_implementation("quantized_kv")
    rows = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        rows.append(tuple(tokens[len(prompt) :]))
    return rows


def engine_of(model: PreTrainedModel, name: str, **sizes) -> Engine:
    options = EngineOptions(kv_cache_dtype=name, **{"prefill_chunk": 20, "max_num_seqs": 8, **sizes})
    return Engine(copy.deepcopy(model), options, frozenset(), SCALES if name == "nvfp4" else None)


def served(engine: Engine) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in engine.generate(prompts(), GREEDY)]


@pytest.mark.parametrize(
    ("architecture", "name"),
    exhaustive_but(product(CONFIGS, NAMES), ("qwen3", "nvfp4"), ("window and softcap", "kvarn_k4v2")),
)
def test_tokens_are_those_over_the_stored_values_batched_alone_and_preempted(architecture: str, name: str):
    model = lively_model(CONFIGS[architecture])
    want = expected(model, name)
    assert len(set(want)) == len(want), "too dull to prove it"
    engine = engine_of(model, name)
    assert served(engine) == want
    assert served(engine) == want, "pages and rows that others used before"
    assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts()] == want
    tight = engine_of(model, name, page_size=GROUP, kv_cache_tokens=80, max_model_len=64)
    assert served(tight) == want
    assert tight.stats().preemptions > 0 and tight.pool.free_pages == tight.pool.num_pages


def test_every_format_matters_so_ignoring_one_would_be_noticed():
    model = lively_model(CONFIGS["qwen3"])
    answers = [tuple(served(engine_of(model, name))) for name in ("unquantized", *NAMES)]
    assert len(set(answers)) == len(answers)


def test_rows_that_only_pad_a_batch_and_chunks_of_any_size_change_nothing():
    model = lively_model(CONFIGS["qwen3"])
    want = served(engine_of(model, "kvarn_k4v2"))
    for sizes in ({"decode_buckets": (1, 4, 8)}, {"prefill_chunk": 3}, {"prefill_chunk": 160}):
        assert served(engine_of(model, "kvarn_k4v2", **sizes)) == want


def test_a_page_and_a_request_take_what_their_tensors_take(monkeypatch: pytest.MonkeyPatch):
    """The figures of Qwen3-4B: bytes for a token and head, and 37.7 MB a request in 36 layers."""
    shape = KVShape(8, 128, 128, torch.bfloat16, 32)
    taken = {name: KV_FORMATS[name] for name in KV_FORMATS}
    per_token = {
        "int4_per_token_head": (16, 136),
        "nvfp4": (16, 144),
        "kvarn_k4v2_g128": (128, 108),
        "kvarn_k4v4_g128": (128, 140),
        "kvarn_k4v2_g64": (64, 114),
        "kvarn_k4v4_g64": (64, 146),
    }
    for name, (page, expected_bytes) in per_token.items():
        assert taken[name].bytes_per_page(shape, page) == page * 8 * expected_bytes
    assert 36 * taken["kvarn_k4v2_g128"].bytes_per_request(shape) == 37_748_736
    assert taken["nvfp4"].bytes_per_request(shape) == 0

    def pages(max_num_seqs: int) -> int:
        """Of 1 GiB, a quarter of which the pool takes once the rows of all requests have theirs."""
        layers = {index: AttentionLayer(shape, AttentionOptions(1.0)) for index in range(36)}
        cpu = torch.device("cpu")
        return kv_pool.pool_pages(layers, taken["kvarn_k4v2_g128"], 128, None, max_num_seqs, 128, cpu)

    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 1 << 30)
    rows = 37_748_736
    assert pages(21) == (2**30 - 22 * rows) // 4 // (36 * 128 * 8 * 108)


def test_a_pool_too_small_names_its_pages_and_the_formats_whose_pages_would_do():
    shape, form = KVShape(8, 128, 128, torch.bfloat16, 32), KV_FORMATS["kvarn_k4v2_g128"]
    layers = {0: AttentionLayer(shape, AttentionOptions(1.0))}

    def refusal(max_model_len: int) -> str:
        with pytest.raises(UserError, match="kv_cache_tokens=100 holds 0 pages of 128 tokens") as refused:
            kv_pool.pool_pages(layers, form, 128, 100, 1, max_model_len, torch.device("cpu"))
        return refused.value.message

    assert "smaller pages: unquantized, fp8" in refusal(64) and "kvarn_k4v2_g64" in refusal(64)
    assert "smaller pages: unquantized, fp8" in refusal(90) and "_g64" not in refusal(90)
    assert "smaller pages" not in refusal(128)


def test_a_window_layer_is_unquantized_and_another_page_size_is_refused():
    form = KV_FORMATS["kvarn_k4v2_g128"]
    window = KVShape(8, 128, 128, torch.bfloat16, 32, sliding_window=512)
    assert form.bytes_per_page(window, 128) == 128 * 8 * 512 and form.bytes_per_request(window) == 0
    with pytest.raises(UserError, match="a page of kvarn_k4v2_g128 holds 128 tokens, not 16"):
        engine_of(lively_model(CONFIGS["qwen3"]), "kvarn_k4v2_g128", page_size=16)
