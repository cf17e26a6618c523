"""Mixtures of experts: single and fused expert weights are all quantized, routers never, each loads again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader import weight_map
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.tests.pipeline.quantization.tiny_families import QWEN_TOWER, ROPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, conversion_mapping
from transformers.core_model_loading import Concatenate, Interleave, WeightConverter

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4},
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 4, "layer_types": ["full_attention"]},
    "granitemoe": {"intermediate_size": 32, "num_local_experts": 4},
    "gemma4_text": {
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "layer_types": ["full_attention"],
    },
}
RECIPE = Recipe("experts", spec=Int4(16))


def make(folder: Path, model_type: str) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.1)
    model.save_pretrained(folder)
    return folder


def is_projection(name: str) -> bool:
    return name.endswith("proj.weight") and "router" not in name


def fuse(folder: Path) -> None:
    """Rewrite a checkpoint of single experts as one of fused ones, as some are published."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.layers.0.mlp.experts."
    parts = {
        name: torch.stack([tensors.pop(f"{prefix}{expert}.{name}.weight") for expert in range(4)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
    tensors[f"{prefix}down_proj"] = parts["down_proj"]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", MODELS)
def test_all_experts_are_quantized_and_the_artifact_runs(tmp_path: Path, model_type: str) -> None:
    source = make(tmp_path / "source", model_type)
    artifact = quantize(source, RECIPE, tmp_path / "out", progress=False)
    modules = artifact.quantization["modules"]
    total = sum(value["shape"][0] * value["shape"][1] for value in modules.values())
    model = load_model(source, progress=False).model
    kept = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    stored = AutoModelForCausalLM.from_pretrained(source).named_parameters()
    big = sum(p.numel() for n, p in stored if p.dim() == 3 or is_projection(n))
    assert total == big
    assert not any("router" in module or module.endswith("mlp.gate") for module in modules)
    routers = artifact.quantization["kept"]["router, never quantized"]
    assert len(routers) == 1
    assert kept[0].shape == kept[1].shape
    loaded = load_model(tmp_path / "out", progress=False)
    assert sum("experts" in product for product in loaded.layouts) == 2
    tokens = torch.randint(3, 64, (1, 16))
    with torch.inference_mode():
        expected, found = model(tokens).logits.float(), loaded.model(tokens).logits.float()
    assert float((found - expected).norm() / expected.norm()) < 0.35


def test_fused_experts_become_the_single_ones_others_read(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3_moe")
    single = quantize(source, RECIPE, tmp_path / "single", progress=False)
    fuse(source)
    fused = quantize(source, RECIPE, tmp_path / "fused", progress=False)
    assert fused.quantization["modules"].keys() == single.quantization["modules"].keys()
    assert "model.layers.0.mlp.experts.3.up_proj" in fused.quantization["modules"]
    first, other = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "fused"))
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_transposed_experts_are_grouped_along_their_inputs(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gpt_oss")
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.experts.down_proj"][2]
    packed = load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.0.mlp.experts.2.down_proj.weight_packed"
    ]
    expected = quantize_int4(weight.T.contiguous(), Int4(16)).weight.codes
    assert torch.equal(packed.view(torch.uint8), expected)


def test_experts_that_loading_may_transpose_are_read_either_way(tmp_path: Path) -> None:
    # The Hub's Qwen3-VL-MoE has [K, N]; what transformers saves has [N, K], and transformers reads both.
    tower = QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    experts = MODELS["qwen3_moe"] | {"moe_intermediate_size": 48}
    text = SIZES | experts | {"rope_parameters": ROPE}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    model.save_pretrained(saved)
    shutil.copytree(saved, hub)
    tensors = load_file(saved / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file({n: t.contiguous() for n, t in turned.items()}, hub / "model.safetensors", {"format": "pt"})
    artifacts = []
    for source in (saved, hub):
        quantize(source, RECIPE, source / "out", progress=False)
        artifacts.append(load_file(source / "out" / "model.safetensors"))
    first, other = artifacts
    assert any(".experts.2.up_proj.weight_packed" in name for name in first)
    assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe", "gemma4_text"])
def test_an_expert_s_gate_and_up_have_the_names_that_engines_read(tmp_path: Path, model_type: str) -> None:
    source = make(tmp_path / "source", model_type)
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    stored = load_file(source / "model.safetensors").values()
    (fused,) = [tensor for tensor in stored if tensor.dim() == 3 and tensor.numel() == 4 * 64 * 64]
    written = load_file(tmp_path / "out" / "model.safetensors")
    (gate_name,) = [name for name in written if name.endswith("experts.2.gate_proj.weight_packed")]
    gate, up = fused[2, :32], fused[2, 32:]
    if model_type == "gpt_oss":
        gate, up = fused[2].T[0::2], fused[2].T[1::2]
    for projection, weight in (("gate_proj", gate), ("up_proj", up)):
        expected = quantize_int4(weight.contiguous(), Int4(16)).weight.codes
        packed = written[gate_name.replace("gate_proj", projection)]
        assert torch.equal(packed.view(torch.uint8), expected), projection


def test_biases_go_with_the_experts_that_they_belong_to(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gpt_oss")
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    prefix = "model.layers.0.mlp.experts."
    assert torch.equal(after[f"{prefix}3.gate_proj.bias"], before[f"{prefix}gate_up_proj_bias"][3, 0::2])
    assert torch.equal(after[f"{prefix}3.up_proj.bias"], before[f"{prefix}gate_up_proj_bias"][3, 1::2])
    assert torch.equal(after[f"{prefix}3.down_proj.bias"], before[f"{prefix}down_proj_bias"][3])
    assert not any(name.endswith("_bias") for name in after)
    artifact = open_checkpoint(tmp_path / "out")
    found = compare_weights(artifact, open_checkpoint(source), artifact.manifest, progress=False)
    assert found is not None and found.figures.missing == () and found.figures.unknown == ()
    assert found.figures.changed == () and found.figures.not_recorded == ()
    kept = Recipe("kept", spec=Int4(16), ignore=("*.experts.*",))
    quantize(source, kept, tmp_path / "kept", progress=False)
    whole = load_file(tmp_path / "kept" / "model.safetensors")
    assert torch.equal(whole[f"{prefix}gate_up_proj_bias"], before[f"{prefix}gate_up_proj_bias"])


@pytest.mark.parametrize("form", ["by turns", "apart"])
def test_gate_and_up_are_found_where_transformers_rearranges_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows by turns, as Inkling 2 stores them, or a tensor for each."""
    source = make(tmp_path / "source", "qwen3_moe")
    fuse(source)
    quantize(source, RECIPE, tmp_path / "fused", progress=False)
    path, experts = source / "model.safetensors", "model.layers.0.mlp.experts."
    tensors = load_file(path)
    gate, up = tensors.pop(f"{experts}gate_up_proj").chunk(2, dim=1)
    if form == "by turns":
        tensors[f"{experts}w13_weight"] = torch.stack([gate, up], dim=2).flatten(1, 2)
        names, operation = ["experts.w13_weight"], Interleave(dim=1)
    else:
        tensors |= {f"{experts}gate_proj.weight": gate, f"{experts}up_proj.weight": up}
        names, operation = ["experts.gate_proj.weight", "experts.up_proj.weight"], Concatenate(dim=1)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    rule = WeightConverter(names, "experts.gate_up_proj", operations=[operation])
    for place in (conversion_mapping, weight_map):
        monkeypatch.setattr(place, "get_model_conversion_mapping", lambda model: [rule])
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    made, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "fused"))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_experts_in_an_order_that_is_not_known_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "jetmoe", **SIZES, intermediate_size=32, num_local_experts=4, kv_channels=16, num_experts_per_tok=2
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match="fused experts in an order that is not known here"):
        quantize(tmp_path / "source", RECIPE, tmp_path / "out", progress=False)


@pytest.mark.parametrize("of_one", [False, True], ids=["one less", "one more"])
def test_another_number_of_experts_than_the_config_says_is_refused(tmp_path: Path, of_one: bool) -> None:
    source = make(tmp_path / "source", "qwen3_moe")
    path = source / "model.safetensors"
    tensors = load_file(path)
    last = [name for name in tensors if ".experts.3." in name]
    for name in last:
        tensors[name.replace(".3.", ".4.")] = tensors[name] if of_one else tensors.pop(name)
    kept = {name: t.clone() for name, t in tensors.items() if of_one or ".experts.4." not in name}
    save_file(kept, path, {"format": "pt"})
    count = 5 if of_one else 3
    with pytest.raises(UserError, match=f"has {count} tensors like .* there are 4 experts"):
        quantize(source, RECIPE, tmp_path / "out", progress=False)


def test_fused_experts_that_lie_otherwise_than_the_models_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3_moe")
    fuse(source)
    path = source / "model.safetensors"
    turned = {name: t.mT.contiguous() if t.dim() == 3 else t for name, t in load_file(path).items()}
    save_file(turned, path, {"format": "pt"})
    with pytest.raises(
        UserError, match=r"down_proj has shape \[4, 32, 64\]; config.json makes it \[4, 64, 32\]"
    ):
        quantize(source, RECIPE, tmp_path / "out", progress=False)


def test_a_rule_may_keep_one_expert_of_a_fused_tensor(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3_moe")
    fuse(source)
    recipe = Recipe("some", spec=Int4(16), rules=(Rule("*.experts.1.*", Unquantized()),))
    quantize(source, recipe, tmp_path / "out", progress=False)
    before = load_file(source / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["model.layers.0.mlp.experts.1.up_proj.weight"], before[1, 32:])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts.1.up_proj" in config["ignore"]


def test_a_rule_for_a_router_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "mixtral")
    with pytest.raises(UserError, match="matches only routers"):
        quantize(source, Recipe("r", rules=(Rule("*.gate", Int4(16)),)), tmp_path / "out", progress=False)
    quantize(source, Recipe("i", spec=Int4(16), ignore=("*.gate",)), tmp_path / "out", progress=False)
    assert Artifact.read(tmp_path / "out").quantization["kept"]
