"""`--target-bits` and `--max-kl`: each group of layers gets the format that buys most, as measured."""

import io
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.base.atomic_files import write_json
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import WeightFormat, spec_from_json
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.compare import bits_per_weight, compare
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import EXPORTS, convention_of
from scalegate.pipeline.model_loader import hidden_states
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.budget import mixed_recipe, sensitivity
from scalegate.pipeline.quantization.budget.allocation import PLAIN, Allocation, Budget, allocate
from scalegate.pipeline.quantization.budget.sensitivity import Group, measure_sensitivity
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.quantization.shards.tasks import make_tasks
from scalegate.pipeline.quantization.shards.weight_tensors import WeightQuantizer
from scalegate.pipeline.quantization.shards.work_record import CALIBRATION_FOLDER, locked_folder
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.tests.exhaustive import exhaustive_but
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

G128, G64, G32 = (Int4(size) for size in (128, 64, 32))
I8 = Int8()
EXPORT = EXPORTS["compressed-tensors"]
RECIPE = Recipe("mixed", spec=G128)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 4)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    monkeypatch.setattr(sensitivity, "TEXT_SEQUENCES", 4)


def group(name: str, n: int, *costs: float) -> Group:
    return Group((name,), ((n, 256),), dict(zip((G128, G64, G32), costs, strict=True)))


GROUPS = [
    group("a", 256, 0.02, 0.015, 0.01),
    group("b", 64, 0.03, 0.002, 0.001),
    group("c", 512, 0.01, 0.009, 0.008),
]


@pytest.mark.parametrize("bits", [4.2, 4.3, 4.5, 6.0])
def test_under_a_budget_of_bits_little_is_left_to_win(bits: float) -> None:
    found = allocate(GROUPS, Budget(bits=bits))
    assert found.bits <= bits
    every = [Allocation(tuple(GROUPS), formats) for formats in product((G128, G64, G32, PLAIN), repeat=3)]
    best = min(allocation.divergence for allocation in every if allocation.bits <= bits)
    uniform = [Allocation(tuple(GROUPS), (spec,) * 3) for spec in (G128, G64, G32)]
    assert all(found.divergence <= allocation.divergence for allocation in uniform if allocation.bits <= bits)
    assert found.divergence <= 1.25 * best


def test_a_budget_of_divergence_is_kept_at_fewer_bits_than_any_uniform_choice() -> None:
    found = allocate(GROUPS, Budget(divergence=0.03))
    assert found.divergence <= 0.03
    assert found.bits < Allocation(tuple(GROUPS), (G64,) * 3).bits


def test_what_cannot_be_kept_is_refused(example_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--target-bits 4: the smallest formats of the recipe take 4\.156"):
        allocate(GROUPS, Budget(bits=4.0))
    with pytest.raises(UserError, match="exclude each other"):
        quantize(example_checkpoint, RECIPE, tmp_path / "o", target_bits=4.5, max_kl=0.1, progress=False)
    with pytest.raises(UserError, match=r"target_bits is .*; it must be a number, above 0"):
        quantize(example_checkpoint, RECIPE, tmp_path / "o", target_bits=-1, progress=False)
    with pytest.raises(UserError, match="--target-bits 20: weights that are not quantized take 16 bits"):
        quantize(example_checkpoint, RECIPE, tmp_path / "o", target_bits=20, progress=False)


def test_a_dry_run_takes_no_budget_of_zero(example_checkpoint: Path, tmp_path: Path) -> None:
    words = ["quantize", str(example_checkpoint), "--out", str(tmp_path / "o"), "--dry-run"]
    result = CliRunner().invoke(main, [*words, "--target-bits", "0"])
    assert result.exit_code == 2 and "target_bits is 0.0; it must be a number, above 0" in result.output


def test_without_weights_to_choose_for_nothing_is_drawn(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_recipe, "sample_sequences", None)
    with pytest.raises(UserError, match="'kvarn-k4v2' leaves no layer to choose a format for"):
        quantize(example_checkpoint, "kvarn-k4v2", tmp_path / "o", target_bits=4.5, progress=False)
    assert not (tmp_path / "o").exists()


def test_what_is_measured_is_the_divergence_of_the_whole_model(example_checkpoint: Path) -> None:
    sequences = torch.randint(0, 8192, (4, 64), generator=torch.Generator().manual_seed(0))
    checkpoint = open_checkpoint(example_checkpoint)
    only = ("*.layers.1.mlp.down_proj", "*.layers.2.self_attn.[qkv]_proj")
    tasks = make_tasks(checkpoint, Recipe("two", spec=G128, include=only)).in_order
    quantizer = WeightQuantizer(torch.bfloat16, torch.device("cpu"))
    groups = measure_sensitivity(checkpoint, tasks, sequences, quantizer, EXPORT, None, False)
    assert [len(group.modules) for group in groups] == [1, 3]
    model = AutoModelForCausalLM.from_pretrained(example_checkpoint, dtype="auto").eval()
    with torch.no_grad():
        log_p = model(sequences).logits.float().log_softmax(-1)
        for group in groups:
            assert list(group.divergence) == [G128, G64, G32, I8]
            # Both hold what bfloat16 rounds otherwise once a weight is another: of INT8's, nearly all.
            assert group.divergence[I8] < group.divergence[G32] / 5
            kept = {name: model.get_submodule(name).weight.data.clone() for name in group.modules}
            for name, weight in kept.items():
                linear = next(t.linear for t in tasks if t.linear is not None and t.linear.module == name)
                rounded = quantizer.quantize(checkpoint, linear, G32, {}).weight.dequantize()
                model.get_submodule(name).weight.data.copy_(rounded)
                assert not torch.equal(rounded, weight)
            log_q = model(sequences).logits.float().log_softmax(-1)
            for name, weight in kept.items():
                model.get_submodule(name).weight.data.copy_(weight)
            expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            assert group.divergence[G32] == pytest.approx(expected, rel=0.1)


FEW = ("*.layers.0.*_proj", "*.layers.1.self_attn.o_proj")


def sensitivity_of(
    checkpoint: Path, spec: WeightFormat = G128, export: str = "compressed-tensors"
) -> list[Group]:
    opened = open_checkpoint(checkpoint)
    tasks = make_tasks(opened, Recipe("few", spec=spec, include=FEW)).in_order
    sequences = torch.randint(0, 8192, (4, 64), generator=torch.Generator().manual_seed(0))
    quantizer = WeightQuantizer(torch.bfloat16, torch.device("cpu"))
    return measure_sensitivity(opened, tasks, sequences, quantizer, EXPORTS[export], None, False)


def test_variants_are_spilled_to_one_file_and_measured_the_same(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sensitivity_of(two_layers)
    states = 4 * 64 * 256 * 2
    monkeypatch.setattr(hidden_states, "MEMORY_BYTES", states)
    held, spilled = [], []
    real = hidden_states.HiddenStates.__init__

    def watched(self: hidden_states.HiddenStates, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        (spilled if self.is_spilled else held).append(self.shape[0] * self.bytes_each)

    monkeypatch.setattr(hidden_states.HiddenStates, "__init__", watched)
    assert sensitivity_of(two_layers) == expected
    assert max(held) == states, "those of the text itself"
    assert spilled == [sum(len(group.divergence) for group in expected) * states]


@pytest.mark.parametrize(
    ("spec", "export"),
    exhaustive_but(
        [(G128, "torchao"), (Int4(64, zero_point="fractional"), "torchao"), (NVFP4(), "compressed-tensors")],
        (G128, "torchao"),
        (NVFP4(), "compressed-tensors"),
    ),
    ids=str,
)
def test_eight_bits_are_not_offered_where_they_cannot_be_stored_or_were_not_seen_served(
    two_layers: Path, spec: WeightFormat, export: str
) -> None:
    groups = sensitivity_of(two_layers, spec, export)
    assert groups and not any(I8 in group.divergence for group in groups)


def test_experts_are_not_offered_eight_bits(tmp_path: Path) -> None:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    sizes = {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **attention, **experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    groups = sensitivity_of(tmp_path)
    of_experts = [group for group in groups if ".experts." in group.modules[0]]
    assert of_experts and not any(I8 in group.divergence for group in of_experts)
    assert all(I8 in group.divergence for group in groups if group not in of_experts)


def test_formats_that_share_tensors_are_measured_with_those(
    two_layers: Path, heldout_text: Path, tmp_path: Path
) -> None:
    options = {"calibration": heldout_text, "device": "cpu", "progress": False}
    artifact = quantize(two_layers, "nvfp4", tmp_path / "o", target_bits=8, **options)
    values = artifact.quantization["sensitivity"]["groups"]
    assert values and all(entry["kl"] > 0 for value in values for entry in value["formats"])
    kinds = {value["chosen"]["format"] for value in values}
    assert kinds == {"nvfp4", "unquantized"}


@pytest.mark.exhaustive
def test_at_fewer_bits_it_is_nearer_than_uniform_groups(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"calibration": heldout_text, "device": "cpu", "progress": False}
    quantize(example_checkpoint, Recipe("g64", spec=G64), tmp_path / "g64", device="cpu", progress=False)
    artifact = quantize(example_checkpoint, RECIPE, tmp_path / "mixed", target_bits=4.31, **options)
    table = artifact.quantization["sensitivity"]
    assert artifact.quantization["bits_per_weight"] == pytest.approx(table["bits_per_weight"], abs=1e-3)
    assert table["bits_per_weight"] <= 4.31
    assert len(table["groups"]) == 16
    alike = {group["modules"][0].split(".")[-1]: len(group["modules"]) for group in table["groups"]}
    assert sorted(alike.values()) == [1, 1, 2, 3]
    text = {"text": heldout_text, "quality_tokens": 3000, "dtype": "float32", "progress": False}
    mixed, g64 = compare([tmp_path / "mixed", tmp_path / "g64"], example_checkpoint, **text).models
    assert mixed.bits_per_weight <= g64.bits_per_weight
    assert mixed.mean_kl < g64.mean_kl
    # Nothing is measured twice.
    monkeypatch.setattr(mixed_recipe, "measure_sensitivity", None)
    again = quantize(example_checkpoint, RECIPE, tmp_path / "mixed", target_bits=4.31, **options)
    assert again.bytes_digest() == artifact.bytes_digest()
    with pytest.raises(UserError, match="made with another source, recipe or text"):
        quantize(example_checkpoint, "int4-hqq-g64", tmp_path / "mixed", target_bits=4.31, **options)
    assert Unquantized() == PLAIN


@pytest.fixture
def options(heldout_text: Path) -> dict[str, Any]:
    return {"calibration": heldout_text, "device": "cpu", "progress": False}


def chosen_for(artifact: Artifact) -> dict[str, WeightFormat]:
    groups = artifact.quantization["sensitivity"]["groups"]
    return {name: spec_from_json(group["chosen"]) for group in groups for name in group["modules"]}


def test_layers_kept_at_16_bits_count_wherever_bits_are_said(
    two_layers: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    artifact = quantize(two_layers, RECIPE, tmp_path / "o", target_bits=8, **options)
    said = artifact.quantization["sensitivity"]["bits_per_weight"]
    assert 7 < said <= 8
    assert artifact.quantization["bits_per_weight"] == pytest.approx(said, abs=1e-3)
    assert bits_per_weight(open_checkpoint(tmp_path / "o")) == pytest.approx(said, abs=1e-3)
    plain = [name for name, spec in chosen_for(artifact).items() if spec == PLAIN]
    kept = artifact.quantization["kept"]
    assert sorted(kept["kept at 16 bits by the budget"]) == sorted(plain)
    assert "ignored by the recipe" not in kept


def test_what_rules_of_the_recipe_say_stays_and_its_bits_count(
    two_layers: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    recipe = Recipe("ruled", spec=G128, rules=(Rule("*.down_proj", G32), Rule("*.q_proj", G64)))
    artifact = quantize(two_layers, recipe, tmp_path / "o", target_bits=4.4, **options)
    formats = {
        name: spec_from_json(value["format"]) for name, value in artifact.quantization["modules"].items()
    }
    assert {formats[name] for name in formats if name.endswith("down_proj")} == {G32}
    assert {formats[name] for name in formats if name.endswith("q_proj")} == {G64}
    # Of q_proj's siblings too, which are loaded as one with it.
    assert {name.split(".")[-1] for name in chosen_for(artifact)} == {"o_proj", "gate_proj", "up_proj"}
    said = artifact.quantization["sensitivity"]["bits_per_weight"]
    assert said <= 4.4
    assert artifact.quantization["bits_per_weight"] == pytest.approx(said, abs=1e-3)


@pytest.mark.exhaustive
def test_weights_replaced_in_place_are_measured_again(
    example_checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    source, out = tmp_path / "source", tmp_path / "o"
    shutil.copytree(example_checkpoint, source)
    before = quantize(source, RECIPE, out, target_bits=4.5, **options)
    # As an interrupted job leaves it.
    table = before.quantization["sensitivity"]
    kept = {name: table[name] for name in ("key", "groups")}
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(UserError, match="made with another source, recipe or text"):
        quantize(source, RECIPE, out, target_bits=4.5, **options)
    after = quantize(source, RECIPE, out, target_bits=4.5, overwrite=True, **options)
    assert after.quantization["sensitivity"]["groups"] != table["groups"]
    other = tmp_path / "interrupted"
    write_json(other / CALIBRATION_FOLDER / "sensitivity.json", kept)
    again = quantize(source, RECIPE, other, target_bits=4.5, **options)
    assert again.quantization["sensitivity"] == after.quantization["sensitivity"]


def test_the_folder_is_checked_and_held_before_anything_is_measured(
    example_checkpoint: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    measured: list[bool] = []

    def measure(*_: object) -> list[Group]:
        with pytest.raises(UserError, match="at work"), locked_folder(tmp_path / "o"):
            pass
        measured.append(True)
        return []

    monkeypatch.setattr(mixed_recipe, "measure_sensitivity", measure)
    with pytest.raises(UserError, match=r"not empty \(it has notes\.txt\)"):
        quantize(example_checkpoint, RECIPE, foreign, target_bits=4.5, **options)
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="did not write"):
        quantize(example_checkpoint, RECIPE, foreign, target_bits=4.5, overwrite=True, **options)
    assert not measured
    with pytest.raises(UserError, match="leaves no layer to choose a format for"):
        quantize(example_checkpoint, RECIPE, tmp_path / "o", target_bits=4.5, **options)
    assert measured


def test_divergence_that_no_format_keeps_is_said_to_be_too_small(
    two_layers: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="--max-kl 1e-12: no layer can be quantized within this divergence"):
        few = Recipe("few", spec=G128, include=FEW)
        quantize(two_layers, few, tmp_path / "o", max_kl=1e-12, **options)


def test_progress_ends_with_the_last_divergence(two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = tqdm(disable=False, file=io.StringIO())
    shares: list[float] = []
    real = sensitivity._divergence

    def divergence(*arguments: Any) -> float:
        shares.append(bar.n / bar.total)
        return real(*arguments)

    def shown(total: int, **_: object) -> tqdm:
        bar.total = total
        return bar

    monkeypatch.setattr(sensitivity, "_divergence", divergence)
    monkeypatch.setattr(sensitivity, "progress_bar", shown)
    checkpoint = open_checkpoint(two_layers)
    tasks = make_tasks(checkpoint, Recipe("few", spec=G128, include=("*.o_proj",))).in_order
    sequences = torch.randint(0, 8192, (2, 32), generator=torch.Generator().manual_seed(0))
    quantizer = WeightQuantizer(torch.bfloat16, torch.device("cpu"))
    measure_sensitivity(checkpoint, tasks, sequences, quantizer, EXPORT, None, True)
    assert shares and max(shares) < 1
    assert bar.n == bar.total


def test_a_budget_of_bits_mixes_four_and_eight_and_what_is_loaded_is_what_is_stored(
    two_layers: Path, heldout_text: Path, tmp_path: Path
) -> None:
    """The command itself; with a method on a text, which rounds the layers of both formats."""
    out = tmp_path / "o"
    words = ["quantize", two_layers, "--recipe", "int4-gptq", "--calibration", heldout_text]
    result = CliRunner().invoke(main, [*map(str, words), "--target-bits", "6", "--out", str(out)])
    assert result.exit_code == 0, result.output
    checkpoint = open_checkpoint(out)
    stored = convention_of(checkpoint).modules(checkpoint)
    assert {weight.spec.name for weight in stored.values()} == {"int4", "int8"}
    assert 5.5 < bits_per_weight(checkpoint) <= 6
    artifact = Artifact.read(out)
    assert chosen_for(artifact) == {module: weight.spec for module, weight in stored.items()}
    assert all(value["output_error"]["calibrated"] > 0 for value in artifact.quantization["modules"].values())
    groups = checkpoint.quantization_config["config_groups"].values()
    assert {(group["format"], group["weights"]["num_bits"]) for group in groups} == {
        ("pack-quantized", 4),
        ("pack-quantized", 8),
    }
    plain = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32).eval()
    for module, stored_weight in stored.items():
        weight = plain.get_submodule(module).weight
        dequantized = stored_weight.read().dequantize(torch.float32)
        distance = float((dequantized - weight.data).norm() / weight.data.norm())
        # More than to round it: it makes up for half of what the layers before it have lost.
        assert distance < (0.1 if stored_weight.spec.name == "int8" else 0.2)
        weight.data.copy_(dequantized)
    ids = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        expected = plain(ids).logits
        found = load_model(out, dtype=torch.float32, progress=False).model(ids).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    shown = CliRunner().invoke(main, ["inspect", str(out)]).output
    assert "INT8 g128" in shown and "INT4 g" in shown
