"""Blocks that layers share are one module; heads tied to embeddings stay two."""

import torch
from scalegate.pipeline.model_loader.tied_modules import share_tied_modules
from scalegate.pipeline.model_loader.weight_map import map_weights
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def test_zambas_attention_blocks_become_one_module():
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "zamba2",
            **SIZES,
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            num_mem_blocks=1,
            n_mamba_heads=4,
            mamba_headdim=16,
        )
        model = AutoModelForCausalLM.from_config(config)
    blocks = [model.get_submodule(f"model.layers.{layer}.shared_transformer") for layer in (1, 3)]
    assert blocks[0] is not blocks[1]
    share_tied_modules(model)
    assert model.get_submodule("model.layers.3.shared_transformer") is blocks[0]
    assert model.get_submodule("model.layers.3.linear") is not model.get_submodule("model.layers.1.linear")


def test_a_head_tied_to_the_embedding_stays_a_module_of_its_own():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=True))
    head = model.lm_head
    share_tied_modules(model)
    assert model.lm_head is head and head is not model.model.embed_tokens


def test_experts_that_two_layers_share_are_found_under_both_names():
    """DiffusionGemma's encoder and decoder share theirs."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    with torch.device("meta"):
        config = AutoConfig.for_model("gpt_oss", **sizes, num_hidden_layers=2)
        model = AutoModelForCausalLM.from_config(config)
    layers = model.get_submodule("model.layers")
    layers[1].mlp = layers[0].mlp
    names = [f"model.layers.{layer}.mlp.experts.0.gate_proj.weight" for layer in range(2)]
    mapped = map_weights(model, names)
    assert mapped.unexpected == []
    targets = {assignment.target for assignment in mapped.assignments}
    assert targets == {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}
