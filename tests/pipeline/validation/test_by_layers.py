"""Quality of models too large for memory: the figures of whole models, with one layer in memory at a time."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.nvfp4 import NVFP4Input
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.input_rounding import InputRounding
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.weight_loader import WeightLoader
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.validation import by_layers
from scalegate.pipeline.validation.by_layers import ModelByLayers
from scalegate.pipeline.validation.options import ValidateOptions
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.evidence.served_in_use import ServedInUse
from scalegate.serving_check.quality import compare, continuation_nats, greedy_gaps
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="module")
def artifact(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("by-layers") / "artifact"
    quantize(two_layers, "int4-hqq", out, device="cpu", progress=False)
    return out


@pytest.fixture(scope="module")
def rounded(two_layers: Path, heldout_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and inputs in NVFP4."""
    out = tmp_path_factory.mktemp("by-layers") / "w4a4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_text, "SEQUENCES", 6)
        patch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
        quantize(two_layers, "nvfp4-w4a4", out, device="cpu", calibration=heldout_text, progress=False)
    return out


def windows(*lengths: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(0, 8192, (length,), generator=drawn) for length in lengths]


def read(folder: Path, texts: list[torch.Tensor]) -> ModelByLayers:
    return ModelByLayers(open_checkpoint(folder), texts, "cpu", progress=False)


def test_the_figures_are_those_of_the_whole_models(artifact: Path, two_layers: Path):
    texts = windows(64, 64, 40)
    found = compare(read(artifact, texts), read(two_layers, texts), texts)
    whole = [load_model(each, device="cpu", progress=False).model for each in (artifact, two_layers)]
    expected = compare(*whole, texts)
    assert found.tokens == expected.tokens
    assert found.baseline_nats_per_token == pytest.approx(expected.baseline_nats_per_token, abs=2e-3)
    assert found.nats_per_token == pytest.approx(expected.nats_per_token, abs=2e-2)
    assert found.mean_kl == pytest.approx(expected.mean_kl, rel=0.1)
    assert expected.mean_kl > 0.01, "there is something to see"


def test_rounded_inputs_give_the_figures_of_the_whole_model(
    rounded: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = windows(64, 40)
    theirs = read(two_layers, texts)
    found = compare(read(rounded, texts), theirs, texts)
    expected = compare(load_model(rounded, device="cpu", progress=False).model, theirs, texts)
    assert found.mean_kl == pytest.approx(expected.mean_kl, rel=0.05)
    assert found.nats_per_token == pytest.approx(expected.nats_per_token, abs=2e-2)
    # The control: weights alone are much closer to the baseline.
    monkeypatch.setattr(NVFP4Input, "round", lambda self, x: x)
    assert compare(read(rounded, texts), theirs, texts).mean_kl < 0.8 * expected.mean_kl


def test_rounded_inputs_of_a_mixture_s_experts_are_those_of_the_whole_model(
    two_layers: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration_text, "SEQUENCES", 2)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=32, intermediate_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((two_layers / name).read_bytes())
    out = tmp_path / "out"
    quantize(tmp_path, "nvfp4-w4a4", out, device="cpu", calibration=heldout_text, progress=False)
    [text] = windows(24)
    with torch.inference_mode():
        expected = load_model(out, device="cpu", progress=False).model(text[None]).logits.float()
        found = read(out, [text])(text[None]).logits.float()
        monkeypatch.setattr(NVFP4Input, "round", lambda self, x: x)
        control = read(out, [text])(text[None]).logits.float()
    assert (found - expected).norm() < 0.03 * expected.norm() < (control - expected).norm()


def test_inputs_of_experts_are_rounded_part_by_part():
    drawn = torch.Generator().manual_seed(0)
    experts, x = torch.randn(2, 6, 16, generator=drawn), torch.randn(3, 16, generator=drawn)
    rounding = InputRounding()
    doubled, halved = (SimpleNamespace(round=lambda x, by=by: x * by) for by in (2, 0.5))
    rounding.add("layer.experts.gate_up_proj", experts, [[(4, doubled), (2, halved)], [(6, halved)]])
    with rounding:
        first, second = (torch.nn.functional.linear(x, expert) for expert in experts)
        other = torch.nn.functional.linear(x, experts[0].clone())
    plain = x @ experts.mT
    assert torch.allclose(first, plain[0] * torch.tensor([2, 2, 2, 2, 0.5, 0.5]), atol=1e-5)
    assert torch.allclose(second, plain[1] * 0.5, atol=1e-5) and torch.allclose(other, plain[0], atol=1e-5)
    assert rounding.drop("layer.") == []
    with rounding:
        assert torch.allclose(torch.nn.functional.linear(x, experts[0]), plain[0], atol=1e-5)


def test_a_layer_whose_input_could_not_be_rounded_is_refused(rounded: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        InputRounding,
        "__torch_function__",
        lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {})),
    )
    with pytest.raises(UserError, match="rounds its input too"):
        read(rounded, windows(16))


def test_answers_are_scored_as_by_the_whole_model(two_layers: Path):
    model = load_model(two_layers, device="cpu", progress=False).model
    texts = windows(48, 30)
    reader = read(two_layers, texts)
    for text in texts:
        prompt, answer = text[:20].tolist(), text[20:].tolist()
        expected = continuation_nats(model, prompt, answer)
        assert continuation_nats(reader, prompt, answer) == pytest.approx(expected, rel=5e-3)
        assert greedy_gaps(reader, prompt, answer) == pytest.approx(
            greedy_gaps(model, prompt, answer), abs=0.3
        )


def test_answers_in_use_are_read_with_the_others_up_to_a_bound(
    artifact: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = [text.tolist() for text in windows(32, 40)]
    answers = [
        ServedInUse(kind, tuple(ids[:16]), tuple(ids[16:]), "", temperature, 1, 1.0, 0)
        for kind, temperature, ids in (("greedy", 0.0, texts[0]), ("sampled", 1.0, texts[1]))
    ]
    sides = {"artifact": open_checkpoint(artifact), "baseline": open_checkpoint(two_layers)}
    run = SimpleNamespace(options=EngineOptions(device="cpu"), progress=False, **sides)
    served = SimpleNamespace(canary=[], baseline_canary=[], texts=[])
    greedy, sampled = by_layers.scorer_by_layers(run, served, answers).answers_in_use(answers)
    assert (greedy.tokens, greedy.draws) == (16, None) and greedy.off > 0 < greedy.baseline_off
    assert sampled.draws is not None and sampled.draws.tokens == 24
    monkeypatch.setattr(by_layers, "PADDED_TOKENS", 79)
    assert by_layers.within_padding(answers) == (answers[0],)


def test_one_layer_is_in_memory_at_a_time(artifact: Path, monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    place = WeightLoader.place_plain

    def counted(self, assignment, reader=None):
        place(self, assignment, reader)
        layers = {
            name.split(".layers.")[1].split(".")[0]
            for name, weight in self.model.named_parameters()
            if ".layers." in name and weight.device.type != "meta"
        }
        held.append(len(layers))

    monkeypatch.setattr(WeightLoader, "place_plain", counted)
    read(artifact, windows(16))
    gc.collect()
    assert len(held) > 20
    assert max(held) == 1


def test_memory_decides_and_our_own_server_never_asks(
    artifact: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
):
    sides = {"artifact": open_checkpoint(artifact), "baseline": open_checkpoint(two_layers)}
    options = EngineOptions(device="cpu")
    elsewhere = SimpleNamespace(asked=ValidateOptions(engine="vllm"), options=options, **sides)
    here = SimpleNamespace(asked=ValidateOptions(engine="embedded"), options=options, **sides)
    assert not by_layers.needs_layers(elsewhere)
    monkeypatch.setattr(by_layers, "free_bytes", lambda device: 4 << 30)
    assert by_layers.needs_layers(elsewhere)
    assert not by_layers.needs_layers(here)
