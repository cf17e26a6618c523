"""Kernels launched while those ahead of them still run compute what they do when launched one by one."""

from dataclasses import replace

import pytest
import torch
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.modules.merged_linear import layers_with_one_input, merge_unquantized
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.serving_check.engine import forward
from scalegate.serving_check.engine.attention import attention_layers
from scalegate.serving_check.engine.compiling import compiled_layers
from scalegate.serving_check.engine.compiling.compiled_layers import TUNINGS
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

pytestmark = pytest.mark.gpu

CONFIG = EngineOptions(max_num_seqs=32, decode_buckets=(1, 8, 32), prefill_chunk=96, max_model_len=256)
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


LAYOUTS_OF = {None: "", Int4(128): "swap_ab", NVFP4(): "nvfp4_swap_ab", FP8(): "fp8_scaled"}


def random_model(spec: WeightFormat | None) -> PreTrainedModel:
    """The same one every time; products of packed weights let the next kernel start before they wait."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16).eval()
    merge_unquantized(model, layers_with_one_input(model, lambda: attention_layers(model)))
    packed: dict[nn.Linear, QuantizedLinear] = {}
    for parent in list(model.model.layers.modules()) if spec else ():
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                if linear not in packed:  # A merged one is a child of each layer that it stands for.
                    weight = spec.random(*linear.weight.shape, model.device)
                    layout = LAYOUTS[LAYOUTS_OF[spec]]
                    packed[linear] = QuantizedLinear(layout.pack(weight, torch.bfloat16), None)
                setattr(parent, name, packed[linear])
    return model


@pytest.mark.parametrize("spec", LAYOUTS_OF, ids=["bf16", "int4", "nvfp4", "fp8"])
def test_tokens_are_those_of_kernels_launched_one_by_one(
    spec: WeightFormat | None, monkeypatch: pytest.MonkeyPatch
):
    prompts = torch.randint(0, 4096, (32, 40), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    answers = []
    for pdl in (False, True):
        tunings = (replace(TUNINGS[0], pdl=pdl), *TUNINGS[1:])
        monkeypatch.setattr(compiled_layers, "TUNINGS", tunings)
        monkeypatch.setattr(forward, "TUNINGS", tunings)
        engine = Engine(random_model(spec), CONFIG, frozenset())
        engine.warm_up(progress=False)
        for _ in range(3):
            answers.append([engine.generate(prompts[:n], greedy) for n in (1, 8, 32)])
    assert len({answer.token_ids for answer in answers[0][2]}) > 16, "other prompts, but no other answers"
    assert answers[3] == answers[4] == answers[5], "what is read is not always what was written"
    assert answers[0] == answers[1] == answers[2] == answers[3]
