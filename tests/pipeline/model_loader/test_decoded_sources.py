"""Sources in 4 or 8 bits: each is read to the numbers that its maker's library computes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.validation.subject import describe_baseline
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.tests.pipeline.source_forms import (
    GROUP,
    NF4,
    awq_tensors,
    gptq_tensors,
    nf4_state,
    nf4_tensors,
    stored_as,
)
from scalegate.tests.pipeline.transformers_reader import assert_transformers_reads_int4_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

RECIPE = Recipe("again", spec=Int4(32))
Source = tuple[Path, dict[str, Tensor]]


def gptq_module(n: int, k: int, bits: int, offset: int, reordered: bool) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and the weight [N, K] that they stand for, computed weight by weight."""
    codes = torch.randint(0, 1 << bits, (k, n))
    zeros = torch.randint(1, 1 << bits, (k // GROUP, n))
    scales = (torch.rand(k // GROUP, n) * 0.01 + 0.001).half()
    groups = torch.arange(k) // GROUP
    if reordered:
        groups = groups[torch.randperm(k)]
    weight = (codes - zeros[groups]).half() * scales[groups]
    return gptq_tensors(codes, zeros, scales, groups, bits, offset), weight.T.contiguous()


def awq_module(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // GROUP, n))
    scales = (torch.rand(k // GROUP, n) * 0.01 + 0.001).half()
    weight = (codes - zeros[torch.arange(k) // GROUP]).half() * scales[torch.arange(k) // GROUP]
    return awq_tensors(codes, zeros, scales), weight.T.contiguous()


def nf4_module(n: int, k: int, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (n * k,), dtype=torch.uint8)
    state = nf4_state(n, k)
    absmax = torch.rand(n * k // 64) * 0.1 + 0.01
    parts = dict[str, Tensor]()
    if nested:
        indices = torch.randint(0, 256, absmax.shape, dtype=torch.uint8)
        values, largest = torch.linspace(-1, 1, 256), torch.rand(-(-len(absmax) // 256)) * 0.05
        absmax = values[indices.int()] * largest[torch.arange(len(absmax)) // 256] + 0.07
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.07}
        parts |= {"weight.nested_absmax": largest, "weight.nested_quant_map": values}
    parts["weight.absmax"] = indices if nested else absmax
    weight = (NF4[codes.int()].view(-1, 64) * absmax.unsqueeze(1)).view(n, k).to(torch.bfloat16)
    return parts | nf4_tensors(codes, state), weight


def int8_module(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, largest = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) + 0.1
    weight = (codes.float() * largest.unsqueeze(1) * (1 / 127)).half()
    return {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}, weight


MAKERS = {
    "gptq": (lambda n, k: gptq_module(n, k, 4, 1, False), {"bits": 4}),
    "gptq, act order": (lambda n, k: gptq_module(n, k, 4, 1, True), {"bits": 4, "desc_act": True}),
    "gptq, 8 bits": (lambda n, k: gptq_module(n, k, 8, 1, False), {"bits": 8}),
    "gptq_v2": (lambda n, k: gptq_module(n, k, 4, 0, False), {"bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": (awq_module, {"bits": 4, "version": "gemm"}),
    "bitsandbytes": (lambda n, k: nf4_module(n, k, False), {"load_in_4bit": True}),
    "bitsandbytes, nested": (lambda n, k: nf4_module(n, k, True), {"load_in_4bit": True}),
    "bitsandbytes, 8 bits": (int8_module, {"load_in_8bit": True}),
}


@pytest.fixture(params=MAKERS)
def source(request: pytest.FixtureRequest, random_checkpoint: Any, edit: Any) -> Source:
    """A checkpoint of integer codes, and the weights that it means."""
    make, section = MAKERS[request.param]
    folder = random_checkpoint("llama", torch.float16)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, meant[name] = make(*tensors.pop(name).shape)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = request.param.split(",")[0].removesuffix("_v2")
    edit(folder, quantization_config={"quant_method": method, "group_size": GROUP, **section})
    return folder, meant


def test_codes_are_decoded_to_the_bits_that_they_stand_for(source: Source) -> None:
    folder, meant = source
    checkpoint = open_checkpoint(folder)
    for name, weight in meant.items():
        assert torch.equal(checkpoint.read(name), weight), name
        assert torch.equal(checkpoint.tensors[name].read_rows(8, 24), weight[8:24])
        assert torch.equal(torch.cat(list(checkpoint.tensors[name].read_chunks())), weight.flatten())
    beside = ("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "nf4", "SCB", "weight_format")
    assert not any(name.endswith(beside) for name in checkpoint.tensors)


def test_codes_are_described_loaded_quantized_and_compared(source: Source, tmp_path: Path) -> None:
    folder, meant = source
    (shown,) = inspect(folder).formats
    assert shown.modules == len(meant)
    assert any(words in shown.format for words in (f"groups of {GROUP}", "blocks of 64", "a scale a row"))
    model = load_model(folder, progress=False).model
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.get_parameter(name).data, meant[name].to(model.dtype))
    artifact = quantize(folder, RECIPE, tmp_path / "out", progress=False)
    assert len(artifact.quantization["modules"]) == len(meant)
    opened = open_checkpoint(tmp_path / "out")
    found = compare_weights(opened, open_checkpoint(folder), opened.manifest, progress=False)
    assert found is not None and found.figures.compared == len(meant)
    assert found.figures.missing == () and found.figures.unknown == () and found.figures.changed == ()


@pytest.fixture
def mxfp4_source(random_checkpoint: Any, edit: Any) -> Source:
    """gpt-oss with its experts as they are published, and what transformers' own conversion makes of them."""
    folder = random_checkpoint("gpt_oss", torch.bfloat16)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 3]:
        experts, k, n = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 125, (experts, n, k // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder, meant


def test_mxfp4_is_decoded_to_transformers_bits(mxfp4_source: Source) -> None:
    folder, meant = mxfp4_source
    checkpoint = open_checkpoint(folder)
    assert describe_baseline(checkpoint, {}).stored_as == "MXFP4"
    for name, weight in meant.items():
        assert torch.equal(checkpoint.read(name), weight)
        assert torch.equal(checkpoint.tensors[name].read_rows(1, 3), weight[1:3])
    assert len(meant) == 4


def test_mxfp4_is_quantized_in_one_command(mxfp4_source: Source, tmp_path: Path) -> None:
    folder, _ = mxfp4_source
    artifact = quantize(folder, RECIPE, tmp_path / "out", progress=False)
    experts = [module for module in artifact.quantization["modules"] if ".experts." in module]
    assert len(experts) == 2 * 4 * 3
    opened = open_checkpoint(tmp_path / "out")
    found = compare_weights(opened, open_checkpoint(folder), opened.manifest, progress=False)
    assert found is not None and found.figures.missing == () and found.figures.unknown == ()
    tokens = torch.randint(3, 90, (1, 12))
    with torch.inference_mode():
        before, after = (
            load_model(each, progress=False).model(tokens).logits.float()
            for each in (folder, tmp_path / "out")
        )
    assert 0 < float((after - before).norm() / before.norm()) < 0.5


def test_a_part_that_is_absent_is_named(mxfp4_source: Source) -> None:
    folder, meant = mxfp4_source
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{next(iter(meant))}_scales"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"_blocks .* is not MXFP4"):
        open_checkpoint(folder)


@pytest.mark.exhaustive
def test_transformers_reads_what_is_made_of_it(source: Source, tmp_path: Path) -> None:
    assert_transformers_reads_int4_of(source[0], tmp_path / "out")


def shorter(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors with one row or number less in each of those that end in `part`."""
    return {name: (t[:-1] if name.endswith(part) else t) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("form", "part", "reason"),
    [
        ("GPTQ", "g_idx", r"has scales \[2, 64\], which do not fit K = 64"),
        ("GPTQ", "qzeros", "zero points of 1 groups and scales of 2"),
        ("AWQ", "qweight", "do not fit K = 63"),
        ("bitsandbytes", "absmax", r"absmax has to hold 64 numbers, not \[63\]"),
        ("bitsandbytes", "quant_map", r"quant_map has to hold 16 numbers, not \[15\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    form: str, part: str, reason: str, random_checkpoint: Any, tmp_path: Path
) -> None:
    folder = stored_as(form, random_checkpoint("llama", torch.float16), tmp_path / "source")
    path = folder / "model.safetensors"
    save_file(shorter(load_file(path), part), path, {"format": "pt"})
    with pytest.raises(UserError, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize(("declared", "fits"), [(24, True), (48, False), (None, False)])
def test_the_config_says_where_groups_end_if_the_last_one_is_shorter(
    declared: int | None, fits: bool, random_checkpoint: Any, edit: Any
) -> None:
    folder = random_checkpoint("llama", torch.float16)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    n, k = tensors.pop(name).shape
    groups = torch.arange(k) // 24
    assert k % 24 and len(groups.unique()) == 3
    codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(1, 16, (3, n))
    scales = (torch.rand(3, n) * 0.01 + 0.001).half()
    parts = gptq_tensors(codes, zeros, scales, groups, 4, 1)
    del parts["g_idx"]
    tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": declared})
    if not fits:
        with pytest.raises(UserError, match=rf"has scales \[3, {n}\], which do not fit K = {k}"):
            open_checkpoint(folder)
        return
    weight = (codes - zeros[groups]).half() * scales[groups]
    assert torch.equal(open_checkpoint(folder).read(name), weight.T)
    assert "groups of 24" in {form.format.rpartition(", ")[2] for form in inspect(folder).formats}


def test_groups_without_scales_are_refused(random_checkpoint: Any, tmp_path: Path) -> None:
    folder = stored_as("GPTQ", random_checkpoint("llama", torch.float16), tmp_path / "source")
    path = folder / "model.safetensors"
    moved = {name: (t + 1 if name.endswith("g_idx") else t) for name, t in load_file(path).items()}
    save_file(moved, path, {"format": "pt"})
    for command in (inspect, lambda source: quantize(source, RECIPE, tmp_path / "out", progress=False)):
        with pytest.raises(UserError, match="g_idx has group numbers beyond the 2 groups that have scales"):
            command(folder)


@pytest.mark.parametrize(("part", "said"), [("scales", "scales in floats"), ("g_idx", "holds no integers")])
def test_parts_of_another_kind_of_number_are_refused(
    part: str, said: str, random_checkpoint: Any, tmp_path: Path
) -> None:
    folder = stored_as("GPTQ", random_checkpoint("llama", torch.float16), tmp_path / "source")
    path = folder / "model.safetensors"
    dtype = torch.int32 if part == "scales" else torch.float32
    tensors = {name: (t.to(dtype) if name.endswith(part) else t) for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=said):
        inspect(folder)


def test_zero_biases_of_autogptq_may_be_left_out(random_checkpoint: Any, tmp_path: Path) -> None:
    folder = stored_as("GPTQ", random_checkpoint("llama", torch.float16), tmp_path / "source")
    path, module = folder / "model.safetensors", "model.layers.0.mlp.down_proj"
    save_file(load_file(path) | {f"{module}.bias": torch.zeros(64).half()}, path, {"format": "pt"})
    pattern = "model.layers.*.mlp.down_proj.bias"
    with pytest.raises(UserError, match=re.escape(f"`leave_out: ['{pattern}']`")):
        quantize(folder, RECIPE, tmp_path / "out", progress=False)
    artifact = quantize(folder, replace(RECIPE, leave_out=(pattern,)), tmp_path / "out", progress=False)
    assert len(artifact.quantization["modules"]) == 14


def gpt_oss_as_published(folder: Path, **sizes: int) -> Path:
    """One decoder layer of gpt-oss-20b with its experts in MXFP4; sizes: of its config, changed."""
    real = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "vocab_size": 512}
    config = AutoConfig.for_model("gpt_oss", **(real | {"num_hidden_layers": 1} | sizes))
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    tensors = {}
    for name, tensor in state.items():
        if tensor.dim() < 3:
            tensors[name] = torch.randn(tensor.shape, dtype=torch.bfloat16) * 0.02
            continue
        experts, k, n = tensor.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, (experts, n, k // 32), dtype=torch.uint8)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    path = folder / "config.json"
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": section}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# All of a layer, 32 whole experts, is 0.8 billion weights: minutes on two cores.
@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2},
        pytest.param({"num_local_experts": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=["narrow experts", "few experts"],
)
def test_gpt_oss_in_its_own_shapes_takes_one_command(sizes: dict[str, int], tmp_path: Path) -> None:
    source, out = gpt_oss_as_published(tmp_path / "source", **sizes), tmp_path / "out"
    result = CliRunner().invoke(main, ["quantize", str(source), "--recipe", "int4-hqq", "--out", str(out)])
    assert result.exit_code == 0, result.output
    artifact = open_checkpoint(out)
    stored = convention_of(artifact).modules(artifact)
    experts = {name: weight for name, weight in stored.items() if ".experts." in name}
    count = sizes.get("num_local_experts", 32) * 3
    assert len(experts) == count and len(stored) == count + 4
    # 2880 is 22.5 * 128.
    groups = {weight.shape[1]: weight.spec.group_size for weight in stored.values()}
    assert groups[2880] == 64
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = {"lm_head", "model.layers.0.mlp.router"}
    assert kept <= set(section["ignore"]) and section["quant_method"] == "compressed-tensors"
    before, biases = open_checkpoint(source), "model.layers.0.mlp.experts"
    fused = before.read(f"{biases}.gate_up_proj")[3].float()
    meant = {"gate_proj": fused[:, 0::2].T, "up_proj": fused[:, 1::2].T}
    both = before.read(f"{biases}.gate_up_proj_bias")[3]
    for index, (name, weight) in enumerate(meant.items()):
        found = stored[f"{biases}.3.{name}"].read().dequantize(torch.float32)
        assert float((found - weight).norm() / weight.norm()) < 0.2
        assert torch.equal(artifact.read(f"{biases}.3.{name}.bias"), both[index::2])
