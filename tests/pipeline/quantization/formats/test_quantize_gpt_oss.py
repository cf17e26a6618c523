"""gpt-oss in its own form of MXFP4: the codes of all experts in one tensor, read back and read by others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.adopt import adopt
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.conventions.gpt_oss import CONVENTION
from scalegate.pipeline.model_loader.contradictions import refuse_contradictions
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.loaded_by_transformers import why_transformers_fails
from scalegate.pipeline.publishing.card import unread_by
from scalegate.pipeline.quantization.quantizers.mxfp4_least_squares import quantize_mxfp4
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.tests.pipeline.quantization.test_quantize_experts import make
from scalegate.tests.pipeline.transformers_reader import read_by_both
from transformers import Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS = "model.layers.0.mlp.experts"
COUNT = 4
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gpt-oss") / "source", "gpt_oss")


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    out = source.parent / "out"
    quantize(source, "mxfp4-experts", out, progress=False)
    return out


def test_all_experts_of_a_layer_are_in_one_tensor_of_codes_and_one_of_scales(
    source: Path, artifact: Path
) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (source, artifact))
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.0.self_attn.q_proj"} <= set(section["modules_to_not_convert"])
    replaced = {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    parts = {f"{name}_{part}" for name in replaced for part in ("blocks", "scales")}
    assert after.keys() == (before.keys() - replaced) | parts
    for name in before.keys() - replaced:
        assert torch.equal(before[name], after[name]), name
    for name in replaced:
        blocks, scales = after[f"{name}_blocks"], after[f"{name}_scales"]
        theirs = convert_moe_packed_tensors(blocks, scales)
        for expert, fused in enumerate(before[name]):
            ours = quantize_mxfp4(fused.T.contiguous(), MXFP4()).weight
            assert torch.equal(theirs[expert].T, ours.dequantize()), name
            assert torch.equal(blocks[expert].flatten(1), ours.codes)


def test_it_comes_back_as_it_was_written_and_is_served_as_mxfp4(source: Path, artifact: Path) -> None:
    checkpoint = open_checkpoint(artifact)
    stored = stored_weights(checkpoint)
    assert len(stored) == COUNT * 3 and all(weight.spec == MXFP4() for weight in stored.values())
    fused = load_file(source / "model.safetensors")[f"{EXPERTS}.gate_up_proj"][2].T
    for turn, projection in enumerate(("gate_proj", "up_proj")):
        expected = quantize_mxfp4(fused[turn::2].contiguous(), MXFP4()).weight
        found = stored[f"{EXPERTS}.2.{projection}"].read()
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
    found = compare_weights(checkpoint, open_checkpoint(source), checkpoint.manifest, progress=False)
    assert found is not None and found.figures.compared == COUNT * 3
    assert found.figures.missing == () and found.figures.unknown == () and found.figures.changed == ()
    assert found.figures.not_quantized == () and found.figures.not_recorded == ()
    loaded = load_model(artifact, progress=False)
    assert set(loaded.layouts) == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}


def test_what_no_manifest_calls_a_release_is_a_source_with_the_same_numbers(
    artifact: Path, tmp_path: Path
) -> None:
    plain = shutil.copytree(artifact, tmp_path / "plain", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    assert not any(weight.is_quantized for weight in stored_weights(open_checkpoint(plain)).values())
    with torch.inference_mode():
        wide, packed = (
            load_model(each, progress=False, dtype=torch.float32).model(TOKENS).logits
            for each in (plain, artifact)
        )
    assert torch.equal(wide, packed)


def test_a_second_round_changes_no_number(artifact: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(artifact, tmp_path / "plain", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    again = quantize(plain, "mxfp4-experts", tmp_path / "again", progress=False)
    assert again.quantization["relative_error"] == 0
    first, second = (stored_weights(open_checkpoint(folder)) for folder in (artifact, tmp_path / "again"))
    for module, weight in first.items():
        assert torch.equal(weight.read().dequantize(), second[module].read().dequantize())


def test_a_checkpoint_of_its_maker_is_adopted_as_mxfp4(source: Path, artifact: Path, tmp_path: Path) -> None:
    theirs = shutil.copytree(artifact, tmp_path / "theirs", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    adopted = adopt(theirs, source, progress=False)
    assert adopted.quantization["export"] == "mxfp4" and len(adopted.quantization["modules"]) == COUNT * 3
    assert adopted.quantization["formats"][0]["spec"] == {"format": "mxfp4"}
    assert adopted.quantization["bits_per_weight"] == 4.25


def test_other_recipes_and_models_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mxfp4 holds experts alone; take the recipe mxfp4-experts"):
        quantize(source, "mxfp4", tmp_path / "out", export="mxfp4", progress=False)
    with pytest.raises(UserError, match="mxfp4 is written in MXFP4 only, not in INT4"):
        quantize(source, "int4-symmetric", tmp_path / "out", export="mxfp4", progress=False)
    some = Recipe("some", spec=MXFP4(), include=("*.experts.*",), ignore=("*.experts.0.*",))
    with pytest.raises(UserError, match="holds all experts of a layer alike, and the recipe keeps some"):
        quantize(source, some, tmp_path / "out", export="mxfp4", progress=False)
    other = make(tmp_path / "other", "qwen3_moe")
    with pytest.raises(UserError, match="the form of gpt-oss alone, and this model is qwen3_moe"):
        quantize(other, "mxfp4-experts", tmp_path / "out", export="mxfp4", progress=False)
    quantize(other, "mxfp4-experts", tmp_path / "out", progress=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mxfp4-pack-quantized"
    assert load_recipe("mxfp4-experts").include == ("*.experts.*",)


def test_a_scale_that_is_no_number_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "spoilt")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_scales"][1, 0, 0] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"down_proj_scales holds NaN"):
        load_model(folder, progress=False)
    with pytest.raises(UserError, match=r"1 of [\d,]+ numbers in .*down_proj_scales are NaN") as said:
        refuse_contradictions(open_checkpoint(folder))
    assert said.value.message.count("_scales") == 1, "read once, not for each expert"


def test_the_tensors_of_a_layer_stay_together_in_several_files(source: Path, tmp_path: Path) -> None:
    quantize(source, "mxfp4-experts", tmp_path / "out", max_shard_bytes=1 << 12, progress=False)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert len(stored_weights(open_checkpoint(tmp_path / "out"))) == COUNT * 3


def test_transformers_reads_the_same_model(artifact: Path) -> None:
    # Its kernels need other packages; without them it decodes the experts to bf16, as told here.
    error, strayed = read_by_both(artifact, quantization_config=Mxfp4Config(dequantize=True))
    # Products of bf16 weights in float32, summed in another order.
    assert strayed == set() and error <= 2.0**-16
    assert why_transformers_fails(open_checkpoint(artifact)) is None
    assert unread_by(artifact, "gpt_oss") == {}


def test_more_than_ten_experts_are_stacked_by_number() -> None:
    names = [f"{EXPERTS}.{expert}.down_proj_blocks" for expert in (10, 2, 0, 1, *range(3, 10))]
    numbered = {name: torch.full((2, 1, 16), int(name.split(".")[-2])) for name in names}
    stacked = CONVENTION.stacked(numbered)[f"{EXPERTS}.down_proj_blocks"]
    assert stacked[:, 0, 0, 0].tolist() == list(range(11))
