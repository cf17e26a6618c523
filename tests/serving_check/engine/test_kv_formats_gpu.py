"""Eight-bit keys and values on a GPU: append, prefill and decode agree with the reference in the engine.

The reference rounds keys and values inside transformers' own attention, and queries to fp16 as the kernels
do. What else rounds otherwise moves some values of the next layer over an edge between two codes. So the
drawn tokens' log-probabilities differ a little, but by much less than from a model that rounds nothing.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from scalegate.kernels.attention.append_kv import quantize_reference
from scalegate.layouts.kv.layer import KVScales
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.sequence import Completion
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...needs_e4m3 import marked

pytestmark = pytest.mark.gpu

NEW_TOKENS = 96
"""More than a page, without which nobody is preempted: admission leaves each running request one page."""
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
SIZES = {"max_model_len": 1024, "max_num_seqs": 32, "decode_buckets": (1, 8, 32), "prefill_chunk": 256}
DTYPES = {"fp8": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}


def rounded_attention(module, query, key, value, attention_mask, **options):
    dtype, scales = module.config.rounded_kv
    scale = scales[module.layer_idx] if module.layer_idx in scales else KVScales(*torch.ones(2, 1).cuda())
    sides = []
    for new, by in ((key, scale.key), (value, scale.value)):
        by = by.cuda().expand(new.shape[1])
        stored, token_scale = quantize_reference(new.transpose(1, 2), dtype, by)
        sides.append(
            (stored.float() * (by if token_scale is None else token_scale).unsqueeze(-1)).transpose(1, 2)
        )
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query.half().float(), *sides, attention_mask, **options)


AttentionInterface.register("rounded_kv_gpu", rounded_attention)
AttentionMaskInterface.register("rounded_kv_gpu", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@pytest.fixture(scope="module")
def model(example_checkpoint: Path):
    return AutoModelForCausalLM.from_pretrained(example_checkpoint, dtype=torch.float32).cuda().eval()


@pytest.fixture(scope="module")
def prompts(example_checkpoint: Path, heldout_text: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(example_checkpoint)
    lines = heldout_text.read_text(encoding="utf-8").splitlines()[:3]
    tokens = tokenizer("".join(json.loads(line)["text"] for line in lines))["input_ids"]
    return [tokens[53 * row : 53 * row + 3 + 9 * row] for row in range(48)]


def calibrated(model) -> dict[int, KVScales]:
    """Scales that are not powers of two, different for each head."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    return {
        layer: KVScales(0.011 + 0.003 * torch.arange(heads), torch.tensor([0.007 + 0.001 * layer]))
        for layer in range(0, layers, 2)
    }


@pytest.mark.parametrize("name", [marked(name) for name in DTYPES])
@pytest.mark.parametrize("sizes", [{}, {"kv_cache_tokens": 2048}], ids=["roomy", "preempted"])
def test_answers_are_those_over_the_stored_values(model, prompts, name: str, sizes: dict):
    scales = calibrated(model) if name == "fp8" else {}
    engine = Engine(
        copy.deepcopy(model), EngineOptions(kv_cache_dtype=name, **SIZES, **sizes), frozenset(), scales
    )
    engine.warm_up(progress=False)
    answers = engine.generate(prompts, GREEDY)
    assert (engine.stats().preemptions > 0) == bool(sizes) and engine.pool.usage == 0
    assert engine.stats().compilations == ()

    rounded = copy.deepcopy(model)
    rounded.config.rounded_kv = DTYPES[name], scales
    rounded.set_attn_implementation("rounded_kv_gpu")
    from_rounded, from_plain = distance(rounded, prompts, answers), distance(model, prompts, answers)
    assert 0 < 2 * from_rounded < from_plain, (from_rounded, from_plain)


def distance(model, prompts: list[list[int]], answers: list[Completion]) -> float:
    """Mean absolute difference of the drawn tokens' log-probabilities from the model's own, nats."""
    differences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        drawn = torch.tensor(answer.token_ids, device="cuda")
        with torch.inference_mode():
            inputs = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
            logits = model(inputs, use_cache=False).logits[0, len(prompt) - 1 : -1]
        ours = torch.tensor([logprobs.logprob for logprobs in answer.logprobs], device="cuda")
        differences.append(ours - logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0])
    return float(torch.cat(differences).abs().mean())


@pytest.mark.parametrize("name, most", [marked("fp8", 0.505), ("int8_per_token_head", 0.6)])
def test_eight_bits_take_half_the_memory(model, name: str, most: float):
    sizes = []
    for stored in ("unquantized", name):
        engine = Engine(
            copy.deepcopy(model).bfloat16(), EngineOptions(kv_cache_dtype=stored, **SIZES), frozenset()
        )
        layer = engine.pool.layers[0]
        held = [layer.key_pages, layer.value_pages, layer.key_scale, layer.value_scale]
        sizes.append(sum(tensor.nbytes for tensor in held if tensor is not None))
    assert 0.495 <= sizes[1] / sizes[0] <= most
