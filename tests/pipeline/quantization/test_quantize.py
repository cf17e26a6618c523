"""Quantizing a folder: what the artifact holds, what travels along, and what is refused and how."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.pipeline.checkpoints.baseline import open_baseline
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.quantization.quantizers.all_quantizers import QUANTIZERS
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.quantization.shards import weight_tensors
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe

RECIPE = Recipe("test", spec=Int4(128))
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def source(example_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint that a test may damage."""
    return Path(shutil.copytree(example_checkpoint, tmp_path / "source"))


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "out"
    quantize(example_checkpoint, RECIPE, folder, max_shard_bytes=1_500_000, progress=False)
    return folder


def stored_weights(folder: Path) -> dict[str, Int4Weight]:
    checkpoint = open_checkpoint(folder)
    modules = convention_of(checkpoint).modules(checkpoint)
    return {name: stored.read() for name, stored in modules.items()}  # type: ignore[misc]


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        quantize(*arguments, progress=False, **options)  # type: ignore[arg-type]
    return caught.value.message


def test_the_artifact_holds_the_solver_s_weights(artifact: Path, example_checkpoint: Path) -> None:
    stored = stored_weights(artifact)
    assert len(stored) == 28
    expected = quantize_int4(open_checkpoint(example_checkpoint).read(f"{DOWN}.weight"), Int4())
    for part in ("codes", "scale", "zero_point"):
        assert torch.equal(getattr(stored[DOWN], part), getattr(expected.weight, part))
    recorded = Artifact.read(artifact).quantization
    assert recorded["modules"][DOWN]["relative_error"] == pytest.approx(expected.relative_error, rel=1e-5)
    assert recorded["bits_per_weight"] == round(4 + 20 / 128, 4)


def test_what_is_not_quantized_is_byte_for_byte_the_same(artifact: Path, example_checkpoint: Path) -> None:
    before, after = open_checkpoint(example_checkpoint), open_checkpoint(artifact)
    kept = [name for name in before.tensors if name in after.tensors]
    assert "model.embed_tokens.weight" in kept
    assert len(kept) == len(before.tensors) - 28
    assert all(torch.equal(before.read(name), after.read(name)) for name in kept)


def test_everything_else_travels_and_is_recorded(artifact: Path, example_checkpoint: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (artifact / name).read_bytes() == (example_checkpoint / name).read_bytes()
    config = json.loads((artifact / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads((example_checkpoint / "config.json").read_text())
    manifest = Artifact.read(artifact)
    assert manifest.changed_files(artifact) == []
    assert manifest.recipe["group_size"] == 128
    assert [path.name for path in artifact.glob(".*")] == [".scalegate-source"]


def test_shards_are_bounded_and_indexed(artifact: Path) -> None:
    shards = sorted(artifact.glob("*.safetensors"))
    assert len(shards) > 2
    embeddings = 8192 * 256 * 2
    assert all(
        shard.stat().st_size < 1_600_000 or shard.stat().st_size < embeddings + 20_000 for shard in shards
    )
    index = json.loads((artifact / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    for shard in shards:
        assert load_file(shard).keys() == {n for n, file in index["weight_map"].items() if file == shard.name}


def test_twice_the_same_call_gives_the_same_bytes_and_returns_early(
    artifact: Path, example_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {path: path.stat().st_mtime_ns for path in artifact.iterdir()}
    quantize(example_checkpoint, RECIPE, artifact, max_shard_bytes=1_500_000)
    assert "finished already" in capsys.readouterr().err
    assert times == {path: path.stat().st_mtime_ns for path in artifact.iterdir()}


def test_another_recipe_does_not_touch_a_finished_artifact(artifact: Path, example_checkpoint: Path) -> None:
    found = refusal(example_checkpoint, Recipe("other", spec=Int4(64)), artifact)
    assert "made with another recipe" in found
    assert "--overwrite" in found
    assert Artifact.read(artifact).changed_files(artifact) == []


def test_where_the_source_lies_is_remembered_and_not_published(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "work" / "out"
    quantize(source, RECIPE, out, progress=False)
    public = [out / "scalegate.json", *(out / name for name in Artifact.read(out).files)]
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in public)
    assert Artifact.read(out).source == "source"
    artifact = open_checkpoint(out)
    assert open_baseline(artifact, None).folder == source
    source.rename(out.parent / "source")
    assert open_baseline(artifact, None).folder == out.parent / "source"
    (out.parent / "source").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="--baseline"):
        open_baseline(artifact, None)


def test_a_damaged_artifact_is_not_taken_for_finished(source: Path, tmp_path: Path) -> None:
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    with open(tmp_path / "out" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x00\x01")
    assert "is damaged (model.safetensors" in refusal(source, RECIPE, tmp_path / "out")


def test_overwrite_starts_over_and_only_in_its_own_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(source, RECIPE, out, max_shard_bytes=1_500_000, progress=False)
    quantize(source, Recipe("other", spec=Int4(64)), out, overwrite=True, progress=False)
    assert Artifact.read(out).recipe["group_size"] == 64
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "did not write" in refusal(source, RECIPE, tmp_path / "mine", overwrite=True)
    assert "not empty (it has thesis.txt)" in refusal(source, RECIPE, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_the_checkpoint_itself_is_no_place_for_the_artifact(source: Path) -> None:
    assert "is the checkpoint itself" in refusal(source, RECIPE, source, overwrite=True)
    assert (source / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_sources_give_the_same_codes(source: Path, artifact: Path, tmp_path: Path, dtype) -> None:
    change_tensors(source, lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    stored, expected = stored_weights(tmp_path / "out"), stored_weights(artifact)
    assert all(torch.equal(stored[name].codes, expected[name].codes) for name in expected)


@pytest.mark.parametrize("scaled", ["block", "tensor", "channel"])
def test_fp8_sources_are_dequantized_first(source: Path, tmp_path: Path, scaled: str) -> None:
    true_weights = {}

    def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            weight = tensors[name].float()
            if scaled == "block":
                blocks = weight.view(weight.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / 448
                scale = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
                tensors[f"{name}_scale_inv"] = blocks
            else:
                scale = (
                    weight.abs().amax(None if scaled == "tensor" else 1, keepdim=scaled == "channel") / 448
                )
                tensors[f"{name}_scale"] = scale.clone()
                tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            true_weights[name] = tensors[name].float() * scale

    change_tensors(source, to_fp8)
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    recipe = Recipe("fp8", ignore=("*.o_proj",))
    quantize(source, recipe, tmp_path / "out", progress=False)
    stored = stored_weights(tmp_path / "out")
    weight = true_weights[f"{DOWN}.weight"]
    assert torch.equal(stored[DOWN].codes, quantize_int4(weight, Int4()).weight.codes)
    artifact = open_checkpoint(tmp_path / "out")
    kept = artifact.read("model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(kept, true_weights["model.layers.0.self_attn.o_proj.weight"].bfloat16())
    assert not [name for name in artifact.tensors if name.endswith(("scale_inv", "input_scale"))]


def test_fp8_without_its_scale_is_refused(source: Path, tmp_path: Path) -> None:
    change_tensors(
        source, lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].to(torch.float8_e4m3fn)})
    )
    assert f"{DOWN}.weight is FP8 and has neither" in refusal(source, RECIPE, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", [f"{DOWN}.weight", "model.norm.weight"])
def test_nan_and_inf_weights_are_refused_by_name(
    source: Path, tmp_path: Path, value: float, tensor: str
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor].view(-1)[5] = value

    change_tensors(source, spoil)
    found = refusal(source, RECIPE, tmp_path / "out")
    assert f"tensor {tensor} (model.safetensors) holds" in found
    assert not (tmp_path / "out" / "scalegate.json").exists()
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_weight_that_is_no_float_is_refused(source: Path, tmp_path: Path) -> None:
    change_tensors(source, lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].to(torch.int8)}))
    assert f"{DOWN}.weight has dtype int8" in refusal(source, RECIPE, tmp_path / "out")


def test_an_artifact_is_not_quantized_again(artifact: Path, tmp_path: Path) -> None:
    said = refusal(artifact, RECIPE, tmp_path / "out")
    assert "is quantized already (28 modules, INT4 g128" in said and "pipeline adopt" in said


def test_a_config_that_does_not_fit_the_weights_is_refused(source: Path, tmp_path: Path) -> None:
    change_config(source, num_hidden_layers=5, layer_types=["full_attention"] * 5)
    assert "model.layers.4" in refusal(source, RECIPE, tmp_path / "out")
    change_config(source, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert "has no place for it" in refusal(source, RECIPE, tmp_path / "out")
    change_config(source, num_hidden_layers=4, layer_types=["full_attention"] * 4, intermediate_size=512)
    assert "by config.json it has to be [" in refusal(source, RECIPE, tmp_path / "out")


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_with_weights_of_its_own_is_not_declared_tied(
    source: Path, tmp_path: Path, differs: bool
) -> None:
    def give_a_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, 0] += 1.0 if differs else 0.0

    change_tensors(source, give_a_head)
    change_config(source, tie_word_embeddings=True)
    quantize(source, RECIPE, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is not differs


def test_a_tied_head_is_untied_when_it_is_quantized(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, Recipe("head", lm_head="quantize"), tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" in stored_weights(tmp_path / "out")
    assert "model.embed_tokens.weight" in open_checkpoint(tmp_path / "out").tensors


def test_quantized_embeddings_are_declared_so_that_nobody_skips_them(
    example_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = Recipe("embeddings", embeddings="quantize")
    quantize(example_checkpoint, recipe, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed_tokens"]
    assert "model.embed_tokens" in stored_weights(tmp_path / "out")
    assert "hold no embeddings" in refusal(example_checkpoint, recipe, tmp_path / "b", export="torchao")


def test_torchao_takes_integer_and_fractional_zeros(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, RECIPE, tmp_path / "a", export="torchao", progress=False)
    fractional = Recipe("f", spec=Int4(zero_point="fractional"), include=("*.layers.0.self_attn.*",))
    found = refusal(example_checkpoint, fractional, tmp_path / "b")
    assert "compressed-tensors cannot store" in found
    quantize(example_checkpoint, fractional, tmp_path / "b", export="torchao", progress=False)
    weight = open_checkpoint(example_checkpoint).read(f"{DOWN}.weight").float()
    back = stored_weights(tmp_path / "a")[DOWN].dequantize(torch.float32)
    assert float((back - weight).norm() / weight.norm()) < 0.11
    assert len(stored_weights(tmp_path / "b")) == 4


def test_a_format_that_is_only_read_is_refused_with_those_that_are_made(
    example_checkpoint: Path, tmp_path: Path
) -> None:
    class ReadOnly(NVFP4):
        name = "nvfp4-of-others"

    found = refusal(example_checkpoint, Recipe("n", spec=ReadOnly()), tmp_path / "out")
    assert f"{DOWN}: Scalegate reads nvfp4-of-others and does not make it; it makes fp8, int4" in found
    assert not (tmp_path / "out").exists()


def test_a_weight_quantized_a_few_rows_at_a_time_is_the_same(
    artifact: Path, example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []
    original = QUANTIZERS["int4"].quantize

    def counted(values, spec, scale_dtype, shared):
        blocks.append(values.shape[0])
        return original(values, spec, scale_dtype, shared)

    monkeypatch.setattr(weight_tensors, "CPU_BLOCK", 100 * 768)
    monkeypatch.setattr(QUANTIZERS["int4"], "quantize", counted)
    only = Recipe("one", include=(DOWN,))
    quantize(example_checkpoint, only, tmp_path / "out", progress=False)
    assert blocks == [100, 100, 56]
    found, expected = stored_weights(tmp_path / "out")[DOWN], stored_weights(artifact)[DOWN]
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in found.tensors().items())


def test_an_unknown_export_lists_the_choices(example_checkpoint: Path, tmp_path: Path) -> None:
    assert "compressed-tensors" in refusal(example_checkpoint, RECIPE, tmp_path / "out", export="gguf")


def test_a_device_that_is_not_there(example_checkpoint: Path, tmp_path: Path) -> None:
    assert "not a device" in refusal(example_checkpoint, RECIPE, tmp_path / "out", device="tpu9000")


def test_a_full_disk_loses_nothing_that_is_finished(example_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # Writing to /dev/full fails as on a full disk; the third shard's temporary file leads there.
    quantize(example_checkpoint, RECIPE, tmp_path / "whole", max_shard_bytes=1_500_000, progress=False)
    names = [path.name for path in sorted((tmp_path / "whole").glob("*.safetensors"))]
    import scalegate.pipeline.quantization.write_shards as module

    original = module.atomic_path

    def on_a_full_disk(path: Path):
        if path.name == names[2]:
            path.with_name(path.name + ".partial").symlink_to("/dev/full")
        return original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "atomic_path", on_a_full_disk)
        found = refusal(example_checkpoint, RECIPE, out, max_shard_bytes=1_500_000)
    assert "no room to write" in found
    assert [path.name for path in sorted(out.glob("*.safetensors*"))] == names[:2]
    times = {name: (out / name).stat().st_mtime_ns for name in names[:2]}
    quantize(example_checkpoint, RECIPE, out, max_shard_bytes=1_500_000, progress=False)
    assert times == {name: (out / name).stat().st_mtime_ns for name in names[:2]}
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_read_only_target_is_refused(example_checkpoint: Path) -> None:
    assert "cannot write in /proc/scalegate" in refusal(example_checkpoint, RECIPE, "/proc/scalegate")


def test_the_command_line_says_what_it_did(example_checkpoint: Path, tmp_path: Path) -> None:
    arguments = [
        "quantize",
        str(example_checkpoint),
        "--recipe",
        "int4-hqq-g64",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["quantized"] == 28
    assert summary["formats"] == {"INT4 g64, zero points": 28}
    again = CliRunner().invoke(main, arguments)
    assert "28 linear weights quantized (28 × INT4 g64, zero points)" in again.stdout
    missing = CliRunner().invoke(main, ["quantize", str(tmp_path / "no"), "--out", str(tmp_path / "o")])
    assert missing.exit_code == 2
    assert "there is no folder" in missing.stderr


def test_a_dry_run_says_what_the_job_writes_and_writes_nothing(source: Path, artifact: Path, tmp_path: Path):
    out = tmp_path / "out"
    words = ["quantize", str(source), "--recipe", "int4-hqq", "--out", str(out), "--dry-run"]
    shown = CliRunner().invoke(main, [*words, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    weights = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    assert found["bytes_written"] == pytest.approx(weights, rel=0.02)
    assert sum(found["formats"].values()) == len(Artifact.read(artifact).quantization["modules"])
    assert 0 < found["seconds"] < 600 and found["memory"] > found["bytes_written"]
    assert "nothing is written" in CliRunner().invoke(main, words).output
    assert not out.exists()
