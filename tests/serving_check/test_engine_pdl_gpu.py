"""Kernels launched while those ahead of them still run compute what they do when launched one by one."""

from dataclasses import replace

import pytest
import torch
from scalegate.layouts.all_layouts import LAYOUTS
from scalegate.layouts.int4 import Int4Weight
from scalegate.layouts.layout import Problem
from scalegate.layouts.linear import QuantizedLinear
from scalegate.layouts.measure import random_weight
from scalegate.serving_check.engine import compiled_layers, forward
from scalegate.serving_check.engine.compiled_layers import TUNINGS
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import EngineConfig, SamplingParams
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(max_num_seqs=32, decode_buckets=(1, 8, 32), prefill_chunk=96, max_model_len=256)
"""Steps of at most 128 tokens: for more, the compiler times kernels and may choose others each time."""
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


def random_model(int4: bool) -> PreTrainedModel:
    """The same one every time; with INT4 weights its products let the next kernel start before they wait."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16).eval()
    for name, linear in list(model.model.layers.named_modules()) if int4 else ():
        if isinstance(linear, nn.Linear):
            problem = Problem(Int4Weight, 128, True, *linear.weight.shape, torch.bfloat16, model.device)
            packed = LAYOUTS["swap_ab"].pack(random_weight(problem), problem.dtype)
            model.model.layers.set_submodule(name, QuantizedLinear(packed, None))
    return model


@pytest.mark.parametrize("int4", [False, True], ids=["bf16", "int4"])
def test_tokens_are_those_of_kernels_launched_one_by_one(int4: bool, monkeypatch: pytest.MonkeyPatch):
    prompts = torch.randint(0, 4096, (32, 40), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    answers = []
    for pdl in (False, True):
        tunings = (replace(TUNINGS[0], pdl=pdl), *TUNINGS[1:])
        monkeypatch.setattr(compiled_layers, "TUNINGS", tunings)
        monkeypatch.setattr(forward, "TUNINGS", tunings)
        engine = Engine(random_model(int4), CONFIG, frozenset())
        engine.warm_up(progress=False)
        for _ in range(3):
            answers.append([engine.generate(prompts[:n], greedy) for n in (1, 8, 32)])
    assert len({answer.token_ids for answer in answers[0][2]}) > 16, "other prompts, but no other answers"
    assert answers[3] == answers[4] == answers[5], "what is read is not always what was written"
    assert answers[0] == answers[1] == answers[2] == answers[3]
