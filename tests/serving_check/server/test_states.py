"""A server of models with recurrent layers whose pool is too small: requests are preempted, tokens stay."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import parse_metrics, total
from scalegate.serving_check.checks.kv_capacity import request_memory
from scalegate.serving_check.evidence.request_memory import RequestMemory
from scalegate.tests.exhaustive import exhaustive_but
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}
HYBRIDS = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
}
"""The gated delta rule, short convolutions and Mamba 2, each beside attention."""
LENGTHS = (5, 19, 34, 47)
OUTPUT = 24
CONTEXT, PAGE = max(LENGTHS) + OUTPUT + 1, 4
POOL = sum(LENGTHS) + PAGE * 2 * len(LENGTHS)
"""Tokens: room for all prompts and a page more for each request, and not for all the answers."""
LEAST_MARGIN = 1e-4
"""Of the best two logits, in standard deviations of all: a hundred times what float32 rounds off them."""


STATES = {
    "qwen3_next": {
        "gated_delta_rule float32": 4 * 4 * 16 * 16,
        "short_convolution float32": 4 * 3 * (2 * 2 * 16 + 4 * 16),
    },
    "lfm2": {"short_convolution float32": 4 * 2 * 64},
    "bamba": {"mamba2 float32": 4 * 8 * 16 * 16, "short_convolution float32": 4 * 3 * (8 * 16 + 2 * 16)},
}
"""Bytes: four for each number of a head's matrix, and of the inputs that a convolution looks back on."""


@dataclass(frozen=True)
class ServedModel:
    kind: str
    source: PreTrainedModel
    url: str

    def metrics(self) -> dict[str, float]:
        return parse_metrics(httpx.get(self.url + "/metrics").text)

    def figure(self, name: str) -> float | None:
        return total(self.metrics(), name)


@pytest.fixture(scope="module", params=exhaustive_but(HYBRIDS, "lfm2"))
def served(request, example_checkpoint: Path, serve_command, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    source = random_model(request.param)
    source.save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example_checkpoint / name, folder / "source")
    words = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", str(CONTEXT)]
    words += ["--kv-cache-tokens", str(POOL), "--page-size", str(PAGE), "--prefill-chunk", "40"]
    command = serve_command(folder / "source", *words, "--served-model-name", "hybrid")
    with SubprocessEndpoint(command, "hybrid", log=folder / "log.txt") as endpoint:
        yield ServedModel(request.param, source, endpoint.base_url)


def random_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES | HYBRIDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.normal_(0.0, 1.3 / parameter.shape[1] ** 0.5)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [
        torch.randint(5, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS
    ]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' greedy tokens, none of them at a near tie."""
    limits = {"max_new_tokens": OUTPUT, "min_new_tokens": OUTPUT, "eos_token_id": None, "do_sample": False}
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), **limits, return_dict_in_generate=True, output_logits=True
        )
    for logits in found.logits:
        best, second = logits[0].topk(2).values
        assert best - second > LEAST_MARGIN * logits.std()
    return found.sequences[0, len(prompt) :].tolist()


def test_preempted_requests_get_the_tokens_of_generate(served):
    asked = {"prompt": prompts(), "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    for preempted_before in (False, True):
        assert bool(served.figure("vllm:num_preemptions")) is preempted_before
        response = httpx.post(
            f"{served.url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=120
        )
        answers = [choice["token_ids"] for choice in response.json()["choices"]]
        assert answers == [generated(served.source, prompt) for prompt in prompts()]
    assert served.figure("vllm:num_requests_running") == served.figure("vllm:kv_cache_usage_perc") == 0


def test_the_server_says_what_it_keeps_of_a_request(served):
    # Keys and values of two heads of 16 numbers, in one layer.
    keys_and_values = 4 * 2 * 2 * 16
    assert request_memory(served.metrics()) == RequestMemory(
        PAGE, PAGE * keys_and_values, 0, STATES[served.kind]
    )
