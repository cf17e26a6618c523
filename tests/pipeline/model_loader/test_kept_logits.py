"""Models whose forward does not know `logits_to_keep` take it all the same."""

from typing import Any

import pytest
import torch
from scalegate.pipeline.model_loader.kept_logits import take_logits_to_keep
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


class AllLogits(LlamaForCausalLM):
    """As MiniCPM-V's class: further arguments are passed on, and nobody reads them."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


def model_of(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=8, **sizes)).eval()


@pytest.mark.parametrize("kept", [0, 1, 3, torch.tensor([1, 4])], ids=str)
def test_logits_are_those_of_a_forward_that_knows_the_argument(kept):
    knows, does_not = model_of(LlamaForCausalLM), model_of(AllLogits)
    take_logits_to_keep(does_not)
    with torch.inference_mode():
        expected = knows(input_ids=TOKENS, logits_to_keep=kept).logits
        for _ in range(2):
            torch.testing.assert_close(does_not(input_ids=TOKENS, logits_to_keep=kept).logits, expected)


def test_a_forward_that_knows_the_argument_stays_its_own():
    model = model_of(LlamaForCausalLM)
    take_logits_to_keep(model)
    assert "forward" not in vars(model)
