"""Experts of classes that do not follow transformers' interface compute the same once they are packed."""

import copy

import pytest
import torch
from scalegate.layouts.modules.experts import PackedExperts
from torch import nn
from transformers import Llama4TextConfig, LongcatFlashConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

HIDDEN = 16
LLAMA4 = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 4}
LONGCAT = {"expert_ffn_hidden_size": 8, "n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 3}


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "llama4":
        made = Llama4TextMoe(Llama4TextConfig(hidden_size=HIDDEN, num_experts_per_tok=2, **LLAMA4))
    else:
        made = LongcatFlashMoE(LongcatFlashConfig(hidden_size=HIDDEN, **LONGCAT))
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return made.eval()


@pytest.mark.parametrize("kind", ["llama4", "longcat"])
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
