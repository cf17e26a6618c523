"""Loading into unmodified transformers models: equal to their own loading and to dequantized twins."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.choosing.plan import LayoutPlan, ShapeChoice
from scalegate.layouts.modules.linear import packed_layers
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model, problems
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, Qwen2ForCausalLM

ARCHITECTURES = (
    "llama",
    "qwen2",
    "phi3",
    "gemma3_text",
    "mistral",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)
FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENS = torch.arange(3, 43).view(2, 20)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def parameter(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter by the name that it has before layers are merged."""
    module, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(module), leaf)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_plain_checkpoint_computes_what_transformers_loading_computes(
    random_checkpoint, model_type: str
) -> None:
    folder = random_checkpoint(model_type, torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    loaded = load_model(folder, progress=False)
    assert not loaded.model.training and loaded.layouts == {}
    for name, theirs in reference.named_parameters():
        ours = parameter(loaded.model, name)
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs), name
    # Merged layers are other products than those apart, which in bfloat16 may round to other numbers.
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = load_model(folder, dtype=torch.float32, progress=False)
    torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "phi3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_quantized_checkpoint_computes_what_its_dequantized_twin_does(
    quantized_pair, model_type: str, symmetric: bool
) -> None:
    pair = quantized_pair(model_type, symmetric, lambda module: 32 if "down_proj" in module else 16)
    twin = load_model(pair.dequantized, progress=False)
    loaded = load_model(pair.quantized, layout="dequantize", progress=False)
    torch.testing.assert_close(logits(loaded.model), logits(twin.model), rtol=1e-4, atol=1e-4)
    assert sum(packed_layers(loaded.model).values()) == len(loaded.layouts) > 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_one_expert_changed_on_disk_changes_the_output(quantized_pair, model_type: str) -> None:
    pair = quantized_pair(model_type)
    before = logits(load_model(pair.quantized, layout="dequantize", progress=False).model)
    file = pair.quantized / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if ".experts.1." in n and n.endswith("down_proj.weight_packed"))
    tensors[name] ^= 0x11111111
    save_file(tensors, file, {"format": "pt"})
    after = logits(load_model(pair.quantized, layout="dequantize", progress=False).model)
    assert not torch.allclose(before, after, atol=1e-3)


def test_problems_name_every_packed_product_without_reading_data(quantized_pair, monkeypatch) -> None:
    pair = quantized_pair("qwen3_moe")
    loaded = load_model(pair.quantized, layout="dequantize", progress=False)
    checkpoint = open_checkpoint(pair.quantized)

    def refuse(*arguments: object) -> None:
        raise OSError("data was read")

    monkeypatch.setattr("scalegate.pipeline.checkpoints.safetensors_file.TensorInfo.read", refuse)
    found = problems(checkpoint)
    assert set(found) == set(loaded.layouts)
    assert {str(problem) for problem in found.values()} == {
        "int4 g32 sym 128x64 float32",
        "int4 g32 sym 64x64 float32",
        "int4 g32 sym 64x64 float32 (12 experts, top 2)",
        "int4 g32 sym 64x32 float32 (12 experts, top 2)",
    }
    assert found["model.layers.0.mlp.experts.gate_up_proj"].experts == Experts(12, 2)
    assert found["model.layers.0.self_attn.q_proj+k_proj+v_proj"].n == 128


QKV, GATE_UP = ["q_proj+k_proj+v_proj"], ["gate_proj+up_proj"]
QKV_APART, GATE_UP_APART = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("name", "merged"),
    [
        ("llmcompressor-w4a16", True),
        ("llmcompressor-mixed", True),
        pytest.param("llmcompressor-nvfp4a16", True, id="global scales that are shared"),
        pytest.param("torchao-nvfp4", False, id="global scales that are not"),
        pytest.param("llmcompressor-nvfp4", True, id="inputs that are rounded by one scale"),
    ],
)
def test_projections_are_one_product_where_their_weights_can_be_one(name: str, merged: bool) -> None:
    found = {key for key in problems(open_checkpoint(FIXTURES / name)) if ".layers.0." in key}
    leaves = {key.rpartition(".")[2] for key in found}
    first = (QKV + GATE_UP) if merged else (QKV_APART + GATE_UP_APART)
    assert leaves == {*first, "o_proj", "down_proj"}


def test_a_projection_of_another_global_scale_is_served_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "llmcompressor-nvfp4a16", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight_global_scale"
    tensors[name] = tensors[name] * 2
    save_file(tensors, file, {"format": "pt"})
    before = load_model(FIXTURES / "llmcompressor-nvfp4a16", progress=False)
    loaded = load_model(folder, progress=False)
    attention = {key for key in loaded.layouts if ".0.self_attn" in key}
    prefix = "model.layers.0.self_attn"
    assert attention == {f"{prefix}.{leaf}" for leaf in ("q_proj+v_proj", "k_proj", "o_proj")}
    x = torch.randn(1, 3, 128, dtype=loaded.model.dtype)
    with torch.inference_mode():
        for leaf, factor in (("q_proj", 1.0), ("k_proj", 0.5), ("v_proj", 1.0)):  # It divides.
            y, expected = (m.model.get_submodule(f"{prefix}.{leaf}")(x) for m in (loaded, before))
            torch.testing.assert_close(y, factor * expected, rtol=2e-2, atol=1e-2)


def test_a_projection_that_rounds_its_input_by_another_scale_is_served_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "llmcompressor-nvfp4", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_global_scale"] *= 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = {key.rpartition(".")[2] for key in problems(open_checkpoint(folder)) if ".0.self_attn" in key}
    assert found == {"q_proj+v_proj", "k_proj", "o_proj"}


def test_projections_of_two_formats_are_merged_as_far_as_they_are_alike(quantized_pair) -> None:
    pair = quantized_pair("qwen3", False, lambda module: 16 if "v_proj" in module else 32)
    loaded = load_model(pair.quantized, layout="dequantize", progress=False)
    attention = {name.rpartition(".")[2] for name in loaded.layouts if ".0.self_attn" in name}
    assert attention == {"q_proj+k_proj", "v_proj", "o_proj"}
    twin = load_model(pair.dequantized, progress=False)
    torch.testing.assert_close(logits(loaded.model), logits(twin.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_gate_and_up_of_two_formats_are_two_products_of_the_experts(quantized_pair, model_type: str) -> None:
    def group_size(module: str) -> int:
        return 32 if ".experts." in module and module.endswith(("up_proj", "w3")) else 16

    pair = quantized_pair(model_type, False, group_size)
    loaded = load_model(pair.quantized, progress=False)
    experts = {name.rpartition(".")[2] for name in loaded.layouts if ".experts." in name}
    assert experts == {"gate_up_proj[0]", "gate_up_proj[1]", "down_proj"}
    twin = load_model(pair.dequantized, progress=False)
    torch.testing.assert_close(logits(loaded.model), logits(twin.model), rtol=1e-4, atol=1e-4)


def test_experts_of_one_layer_in_two_formats_are_refused(quantized_pair) -> None:
    pair = quantized_pair("qwen3_moe", True, lambda module: 16 if ".experts.3." in module else 32)
    with pytest.raises(UserError, match=r"experts of .* differ in format or shape"):
        load_model(pair.quantized, progress=False)


def test_tied_weights_are_one_tensor(random_checkpoint) -> None:
    model = load_model(random_checkpoint("qwen3"), progress=False).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_checkpoint_that_stores_only_the_head_is_tied_the_other_way(random_checkpoint) -> None:
    folder = random_checkpoint("qwen3")
    before = logits(load_model(folder, progress=False).model)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load_model(folder, progress=False).model), before)


def test_the_plan_decides_and_a_layout_that_is_asked_for_overrules_it(quantized_pair) -> None:
    pair = quantized_pair("qwen2")
    found = problems(open_checkpoint(pair.quantized), torch.bfloat16)
    choices = tuple(ShapeChoice(str(p), "dequantize", (name,)) for name, p in found.items())
    plan = LayoutPlan("anywhere", {}, choices)
    planned = load_model(pair.quantized, dtype=torch.bfloat16, plan=plan, progress=False)
    assert set(planned.layouts.values()) == {"dequantize"}
    forced = load_model(pair.quantized, dtype=torch.bfloat16, plan=plan, layout="cpu_int4", progress=False)
    assert set(forced.layouts.values()) == {"cpu_int4"}


def test_a_layout_that_is_asked_for_is_taken_where_it_is_for_such_products(quantized_pair) -> None:
    """A layout of dense layers says nothing of experts, and one of experts nothing of dense layers."""
    pair = quantized_pair("qwen3_moe")
    products = problems(open_checkpoint(pair.quantized))
    experts = {name for name, problem in products.items() if problem.experts is not None}
    assert experts and experts != set(products)
    for forced, meant in (
        ("cpu_int4_float32", set(products) - experts),
        ("cpu_int4_float32_per_expert", experts),
    ):
        layouts = load_model(pair.quantized, layout=forced, progress=False).layouts
        assert {name for name, layout in layouts.items() if layout == forced} == meant
        assert {layout for name, layout in layouts.items() if name not in meant} <= {
            "dequantize",
            "dequantize_per_expert",
        }


def test_a_layout_that_cannot_serve_a_layer_is_refused_by_name(quantized_pair) -> None:
    pair = quantized_pair("qwen2", True, lambda module: 16)
    with pytest.raises(UserError, match=r"layout 'cpu_int4' does not serve model\.layers\.\d"):
        load_model(pair.quantized, layout="cpu_int4", progress=False)
    with pytest.raises(UserError, match=r"'dequantize_per_expert' does not serve .*: is for experts only"):
        load_model(pair.quantized, layout="dequantize_per_expert", progress=False)
    with pytest.raises(UserError, match="unknown layout 'fast'; choose one of"):
        load_model(pair.quantized, layout="fast", progress=False)


def test_biases_survive_packing(quantized_pair) -> None:
    pair = quantized_pair("qwen2")
    tensors = load_file(pair.quantized / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors[name] = torch.arange(64.0)
    save_file(tensors, pair.quantized / "model.safetensors", {"format": "pt"})
    model = load_model(pair.quantized, layout="dequantize", progress=False).model
    assert torch.equal(parameter(model, name), torch.arange(64.0))


def test_the_dtype_is_the_configs_unless_another_is_asked_for(example_checkpoint: Path) -> None:
    assert load_model(example_checkpoint, progress=False).model.dtype == torch.bfloat16
    wide = load_model(example_checkpoint, dtype=torch.float32, progress=False)
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    assert wide.tokenizer is not None and wide.generation_config.eos_token_id == 0


def test_a_dtype_that_transformers_does_not_know_is_refused_by_its_name(
    random_checkpoint, edit: Callable
) -> None:
    folder = random_checkpoint("llama")
    edit(folder, dtype="torch.bfloat16")
    with pytest.raises(UserError, match=r"`dtype: torch.bfloat16`, which transformers .*; write bfloat16$"):
        load_model(folder, progress=False)


def test_fp8_blocks_are_read_as_ordinary_weights(random_checkpoint, edit: Callable) -> None:
    folder = random_checkpoint("llama", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    scales = torch.rand(2, 2) + 0.5
    name = "model.layers.0.self_attn.q_proj.weight"
    quantized = (tensors[name].float() * 4).to(torch.float8_e4m3fn)
    save_file(
        tensors | {name: quantized, f"{name}_scale_inv": scales},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    weight = parameter(load_model(folder, progress=False).model, name)
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(weight, (quantized.float() * spread).to(torch.bfloat16))


def test_a_packed_model_holds_its_weights_once(quantized_pair) -> None:
    pair = quantized_pair("mixtral")
    model = load_model(pair.quantized, layout="dequantize", progress=False).model
    held = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    twin = load_model(pair.dequantized, progress=False).model
    expected = sum(t.numel() * t.element_size() for t in [*twin.parameters(), *twin.buffers()])
    assert held <= expected


def test_the_wrong_model_type_is_refused_not_half_loaded(random_checkpoint, edit: Callable) -> None:
    folder = random_checkpoint("qwen2")
    edit(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(UserError, match=r"model\.layers\.2\.\S+ .*missing from the checkpoint"):
        load_model(folder, progress=False)
    edit(folder, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(UserError, match=r"model\.layers\.1\.\S+, .*and \d+ more in the checkpoint"):
        load_model(folder, progress=False)
    edit(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2, hidden_size=32)
    with pytest.raises(UserError, match=r"has shape \[\d+(, \d+)?\]; by the config it has to be"):
        load_model(folder, progress=False)


def test_a_missing_weight_is_named_before_any_data_is_read(random_checkpoint, monkeypatch) -> None:
    folder = random_checkpoint("qwen2")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def refuse(*arguments: object) -> None:
        raise OSError("data was read")

    monkeypatch.setattr("scalegate.pipeline.checkpoints.safetensors_file.TensorInfo.read", refuse)
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing from the checkpoint"
    ):
        load_model(folder, progress=False)


def test_an_encoder_is_refused_as_no_causal_model(random_checkpoint, edit: Callable) -> None:
    folder = random_checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "vit", "architectures": ["ViTModel"]})
    )
    with pytest.raises(UserError, match="causal language model"):
        load_model(folder, progress=False)


def test_a_class_that_only_holds_models_is_refused_by_name(random_checkpoint, monkeypatch) -> None:
    def embeddings(model: nn.Module) -> nn.Module:
        """Those of Qwen2.5-Omni's whole, whose parts have embeddings of their own."""
        raise NotImplementedError

    folder = random_checkpoint("qwen2")
    monkeypatch.setattr(Qwen2ForCausalLM, "get_input_embeddings", embeddings)
    with pytest.raises(UserError, match=r"'qwen2'\): Qwen2ForCausalLM takes no tokens; the models that it"):
        load_model(folder, progress=False)


def test_of_an_omni_model_the_part_that_generates_text_is_loaded(tmp_path: Path) -> None:
    tower = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    parts = {"audio_config": tower | {"output_dim": 64}, "vision_config": vision, "text_config": text}
    config = AutoConfig.for_model("qwen2_5_omni", thinker_config=parts)
    thinker = AutoModelForMultimodalLM.from_config(config.thinker_config, dtype=torch.float32).eval()
    config.save_pretrained(tmp_path)
    tensors = {f"thinker.{name}": tensor.contiguous() for name, tensor in thinker.state_dict().items()}
    talker = {"talker.codec_head.weight": torch.zeros(8, 8)}
    save_file(tensors | talker, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load_model(tmp_path, progress=False)
    assert type(loaded.model) is type(thinker)
    places = torch.arange(TOKENS.shape[1]).expand(3, len(TOKENS), -1)
    with torch.inference_mode():
        found, expected = (
            model(input_ids=TOKENS, position_ids=places).logits for model in (loaded.model, thinker)
        )
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_on_cuda_the_same_numbers(quantized_pair, model_type: str) -> None:
    pair = quantized_pair(model_type)
    on_cpu = load_model(pair.quantized, layout="dequantize", progress=False).model
    on_gpu = load_model(pair.quantized, layout="dequantize", device="cuda", progress=False).model
    assert {t.device.type for t in [*on_gpu.parameters(), *on_gpu.buffers()]} == {"cuda"}
    with torch.inference_mode():
        found = on_gpu(TOKENS.cuda()).logits.cpu()
    torch.testing.assert_close(found, logits(on_cpu), rtol=1e-3, atol=1e-3)


def test_a_problem_is_the_same_from_the_header_and_from_the_weight(quantized_pair) -> None:
    pair = quantized_pair("qwen3", False, lambda module: 32)
    checkpoint = open_checkpoint(pair.quantized)
    from scalegate.pipeline.conventions.all_conventions import convention_of

    for stored in convention_of(checkpoint).modules(checkpoint).values():
        cpu = torch.device("cpu")
        assert stored.problem(torch.bfloat16, cpu) == Problem.of(stored.read(), torch.bfloat16, cpu)
