"""Experts of classes that do not follow transformers' interface compute the same once they are packed."""

import copy

import pytest
import torch
from scalegate.layouts.modules.experts import PackedExperts
from torch import nn
from transformers import Llama4TextConfig, LongcatFlashConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7SparseMoeBlock

HIDDEN = 16
LLAMA4 = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 4}
LONGCAT = {"expert_ffn_hidden_size": 8, "n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 3}
STEP = {
    "num_hidden_layers": 2, "moe_intermediate_size": 8, "share_expert_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "swiglu_limits": [0.0, 0.25],
    "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
"""Its second layer clamps what the gate and the up projection give."""


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "llama4":
        made = Llama4TextMoe(Llama4TextConfig(hidden_size=HIDDEN, num_experts_per_tok=2, **LLAMA4))
    elif kind == "step3p7":
        made = Step3p7SparseMoeBlock(Step3p7TextConfig(hidden_size=HIDDEN, **STEP), 1)
    else:
        made = LongcatFlashMoE(LongcatFlashConfig(hidden_size=HIDDEN, **LONGCAT))
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return made.eval()


@pytest.mark.parametrize("kind", ["llama4", "longcat", "step3p7"])
def test_a_layer_with_packed_experts_computes_what_it_did(kind):
    plain = mixture(kind)
    packed = copy.deepcopy(plain)
    packed.experts = PackedExperts(packed.experts, {})
    x = torch.randn(1, 9, HIDDEN)
    with torch.inference_mode():
        expected, output = (module(x) for module in (plain, packed))
    # Llama 4's returns its router's logits too.
    ours, theirs = (found[0] if isinstance(found, tuple) else found for found in (output, expected))
    torch.testing.assert_close(ours.view(9, HIDDEN), theirs.view(9, HIDDEN))
    assert theirs.abs().max() > 0.1


def test_some_of_longcats_choices_are_experts_that_return_their_input():
    with torch.inference_mode():
        _, _, index = mixture("longcat").router(torch.randn(1, 9, HIDDEN))
    is_identity = index >= LONGCAT["n_routed_experts"]
    assert is_identity.any() and not is_identity.all()
