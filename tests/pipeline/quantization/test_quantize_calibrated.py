"""A recipe with `method: gptq`, from a text to an artifact: better outputs, equal bytes whatever happened."""

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader import hidden_states, layer_stream
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.publishing.card_phrases import calibration_phrase
from scalegate.pipeline.quantization import job_calibration
from scalegate.pipeline.quantization.calibration import (
    calibration,
    calibration_text,
    layer_solver,
    self_calibration,
)
from scalegate.pipeline.quantization.calibration.calibration_names import CALIBRATION, SCARCE
from scalegate.pipeline.quantization.calibration.calibration_text import read_calibration_text
from scalegate.pipeline.quantization.quantizers import int4_second_order
from scalegate.pipeline.quantization.shards.work_record import CALIBRATION_FOLDER
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_fields import AWQ_GPTQ, GPTQ
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.held_out import read_held_out
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.weights import check_weights
from scalegate.tests.exhaustive import exhaustive_but
from transformers import AutoConfig, AutoModelForCausalLM

RECIPE = Recipe("gptq", spec=Int4(64), method=GPTQ)
LAYERS = 2


class PowerCut(BaseException):
    """What stops a job where nothing can catch it."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calibration_text, "SEQUENCES", 12)
    patch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    patch.setattr(layer_stream, "SEQUENCES_AT_ONCE", 5)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, example_checkpoint: Path) -> Path:
    """A random Qwen3 of two narrow layers, with the bundled checkpoint's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    return made(folder, example_checkpoint, "qwen3", intermediate_size=192)


def made(folder: Path, tokenizer: Path, kind: str, layers: int = LAYERS, **sizes: int) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8192} | sizes
    sizes |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(kind, **sizes, head_dim=64, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".scalegate-source"}


def make(source: Path, recipe: Recipe, out: Path, text: Path | str | None) -> Artifact:
    return quantize(source, recipe, out, calibration=text, device="cpu", progress=False)


@pytest.fixture(scope="module")
def whole(small: Path, heldout_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the recipe and the text, made without anything that happened."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        make(small, RECIPE, folder, heldout_text)
    return folder


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, progress=False).model(tokens).logits.float()


def test_the_model_s_outputs_are_nearer(
    two_layers: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 24)
    # The text alone: what the model writes beside it would be as many sequences again.
    monkeypatch.setattr(job_calibration, "can_draw", lambda *_: False)
    text = read_calibration_text(open_checkpoint(two_layers), str(heldout_text)).sequences
    assert text is not None
    tokens = text[-6:]
    expected = logits(two_layers, tokens)
    far = {}
    for recipe in (RECIPE, Recipe("plain", spec=Int4(64))):
        make(two_layers, recipe, tmp_path / recipe.name, heldout_text)
        far[recipe.name] = float((logits(tmp_path / recipe.name, tokens) - expected).norm())
    assert far["gptq"] < 0.9 * far["plain"]
    modules = Artifact.read(tmp_path / "gptq").quantization["modules"]
    errors = [module["output_error"] for module in modules.values()]
    assert len(errors) == 14
    assert sum(error["calibrated"] for error in errors) < 0.6 * sum(error["data_free"] for error in errors)
    assert (
        "output_error" not in Artifact.read(tmp_path / "plain").quantization["modules"][next(iter(modules))]
    )


@pytest.mark.parametrize(
    "recipe",
    exhaustive_but(
        [
            RECIPE,
            Recipe("awq", spec=Int4(64), method=AWQ_GPTQ),
            Recipe("w4a4", spec=NVFP4(activations=True), method=GPTQ),
            Recipe("learned", spec=Int4(64), method=GPTQ, learned_rounding=6),
            Recipe("iq2", spec=IQ2XXS()),
        ],
        RECIPE,
    ),
    ids=lambda recipe: recipe.name,
)
def test_killed_in_any_layer_the_artifact_is_the_same(
    example_checkpoint: Path, small: Path, whole: Path, heldout_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe,
) -> None:  # fmt: skip
    source = example_checkpoint if recipe.name == "iq2" else small
    if recipe != RECIPE:
        whole = tmp_path / "whole"
        make(source, recipe, whole, heldout_text)
    looked: list[str] = []
    look = calibration._Visit.look

    def until_the_power_goes(visit: calibration._Visit) -> calibration.CalibratedLayer:
        looked.append(visit.name)
        if len(looked) % 2 == 0:
            raise PowerCut
        return look(visit)

    out = tmp_path / "killed"
    monkeypatch.setattr(calibration._Visit, "look", until_the_power_goes)
    kills = 0
    while not (out / "scalegate.json").is_file():
        try:
            make(source, recipe, out, heldout_text)
        except PowerCut:
            kills += 1
            assert (out / CALIBRATION_FOLDER).is_dir()
    layers = len({*looked})
    assert kills == layers - 1
    assert len(looked) == 2 * layers - 1, "a finished layer was looked into again"
    assert contents(out) == contents(whole)


@pytest.mark.exhaustive
def test_killed_after_a_large_model_wrote_its_text_the_artifact_is_the_same(
    small: Path, whole: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From here on the model is too large to write in 16 bits: its linears are in INT4 while it does.
    monkeypatch.setitem(self_calibration.LARGEST_PLAIN, "cpu", 0)
    make(small, RECIPE, tmp_path / "large", heldout_text)
    look, out = calibration._Visit.look, tmp_path / "killed"

    def without_power(_: calibration._Visit) -> calibration.CalibratedLayer:
        raise PowerCut

    monkeypatch.setattr(calibration._Visit, "look", without_power)
    with pytest.raises(PowerCut):
        make(small, RECIPE, out, heldout_text)
    monkeypatch.setattr(calibration._Visit, "look", look)
    make(small, RECIPE, out, heldout_text)
    assert contents(out) == contents(tmp_path / "large") != contents(whole)


def test_rounded_weights_wait_on_disk_until_they_are_written(
    small: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["scalegate.pipeline.commands.quantize"]
    write_shards, counts = module.write_shards, []

    def alive() -> int:
        return sum(type(candidate) is Int4Weight for candidate in gc.get_objects())

    def counting(job: Any, record: Any, shards: Any, known: Any, *rest: Any) -> None:
        gc.collect()
        before = alive()
        kept = [read() for read in known.solved.values()]
        counts.append((before, alive() - before, len(kept)))
        write_shards(job, record, shards, known, *rest)

    monkeypatch.setattr(module, "write_shards", counting)
    make(small, RECIPE, tmp_path / "out", heldout_text)
    assert counts == [(0, LAYERS * 7, LAYERS * 7)]


def test_spilled_hidden_states_give_the_same_bytes(
    small: Path, whole: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "MEMORY_BYTES", 1000)
    make(small, RECIPE, tmp_path / "disk", heldout_text)
    assert contents(whole) == contents(tmp_path / "disk")


def test_weights_with_the_same_inputs_are_solved_as_one_to_the_same_bytes(
    small: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    solve = int4_second_order.solve

    def counting(weight: torch.Tensor, *rest: object) -> object:
        rows.append(len(weight))
        return solve(weight, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(int4_second_order, "solve", counting)
    make(small, RECIPE, tmp_path / "alone", heldout_text)
    alone = rows.copy()
    rows.clear()
    monkeypatch.setattr(layer_solver, "STACKED", ("cpu",))
    make(small, RECIPE, tmp_path / "stacked", heldout_text)
    assert sum(rows) == sum(alone) and len(alone) == LAYERS * 7 and len(rows) == LAYERS * 4
    assert contents(tmp_path / "stacked") == contents(tmp_path / "alone")


@pytest.mark.parametrize(("room", "on_gpu"), [(4096, True), (4095, False)])
def test_hidden_states_stay_on_a_gpu_where_they_fit(
    room: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "gpu_room", lambda device, for_variants: room)
    monkeypatch.setattr(hidden_states, "MEMORY_BYTES", 1000)
    states = hidden_states.HiddenStates((4, 8, 64), torch.bfloat16, device=torch.device("meta"))
    assert states.is_spilled != on_gpu
    assert states.device.type == ("meta" if on_gpu else "cpu")


def test_with_no_text_the_model_writes_one(
    small: Path, whole: Path, heldout_text: Path, tmp_path: Path
) -> None:
    drawn = [make(small, RECIPE, tmp_path / name, None).bytes_digest() for name in ("one", "two")]
    assert drawn[0] == drawn[1]
    assert Artifact.read(whole).bytes_digest() != drawn[0]
    recipe = Recipe("gptq", spec=Int4(64), method=GPTQ, calibration=str(heldout_text))
    assert make(small, recipe, tmp_path / "said", None).bytes_digest() != drawn[0]


def test_a_model_that_does_not_fit_into_memory_asks_for_a_text(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_calibration, "free_memory", lambda _: 1000)
    with pytest.raises(UserError, match=r"does not fit into memory, so it cannot generate .* --calibration"):
        make(small, RECIPE, tmp_path / "out", None)


def test_experts_that_few_tokens_reach_are_solved_with_their_layer_in_view(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    (tmp_path / "moe").mkdir()
    source = made(tmp_path / "moe", example_checkpoint, "qwen3_moe", 1, intermediate_size=64, **sizes)
    artifact = quantize(source, RECIPE, tmp_path / "out", calibration=heldout_text, device="cpu")
    scarce = artifact.quantization[CALIBRATION][SCARCE]
    assert (
        f"{len(scarce)} experts, such as {scarce[0]}, get fewer tokens of the text than they"
        in capsys.readouterr().err
    )
    said = str(calibration_phrase(artifact.quantization[CALIBRATION]))
    assert f"{len(scarce)} experts got fewer tokens of it than they have inputs" in said
    experts = {name for name in artifact.quantization["modules"] if ".experts." in name}
    assert len(experts) == 16 * 3
    assert experts > set(scarce) and scarce
    errors = [artifact.quantization["modules"][name]["output_error"] for name in experts]
    assert sum(error["calibrated"] for error in errors) < sum(error["data_free"] for error in errors)
    assert load_model(tmp_path / "out", progress=False).layouts


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(made(tmp_path, example_checkpoint, "qwen3", vocab_size=1024))
    said = r"has 8192 tokens, and the model .* only 1024: token \d+ of the text is unknown to the model"
    with pytest.raises(UserError, match=said):
        read_calibration_text(checkpoint, str(heldout_text))
    with pytest.raises(UserError, match=said):
        read_held_out(heldout_text, checkpoint, checkpoint, 300)


def test_a_broken_line_of_a_text_is_named(example_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two\n')
    checkpoint = open_checkpoint(example_checkpoint)
    with pytest.raises(UserError, match=r"text\.jsonl is not a text: line 2 is not"):
        read_calibration_text(checkpoint, str(path))
    with pytest.raises(UserError, match=r"text\.jsonl is not held-out text: line 2 is not"):
        read_held_out(path, checkpoint, checkpoint, 300)


def test_a_data_set_of_the_hub_is_streamed_until_there_is_enough(
    example_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(example_checkpoint)
    asked: list[tuple[str | None, ...]] = []
    taken: list[int] = []

    def load_dataset(
        path: str, name: str | None, *, split: str, revision: str | None, streaming: bool
    ) -> Iterator[dict[str, str]]:
        assert streaming
        asked.append((path, name, split, revision))
        for index in range(1000):
            taken.append(index)
            yield {"code": f"def number_{index}():\n    return {index}\n" * 10}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = read_calibration_text(checkpoint, "hub:org/some:test:code")
    assert found.sequences is not None
    assert found.sequences.shape == (12, 64)
    assert len(taken) < 100
    read_calibration_text(checkpoint, "hub:org/some/wiki-2@refs/pr/1:test:code")
    read_calibration_text(checkpoint, "hub:some@v1::code")
    assert asked == [
        ("org/some", None, "test", None),
        ("org/some", "wiki-2", "test", "refs/pr/1"),
        ("some", None, "train", "v1"),
    ]
    form = re.escape("hub:OWNER/NAME[/CONFIGURATION][@REVISION][:SPLIT[:COLUMN]]")
    for wrong in ("hub:org/some", "hub:", "hub:org/", "hub:org/some@", "hub:org/some:test:code:more"):
        with pytest.raises(UserError, match=form):
            read_calibration_text(checkpoint, wrong)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'scalegate\[datasets\]'"):
        read_calibration_text(checkpoint, "hub:org/some")


def test_a_method_that_a_format_does_not_have_is_refused(example_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no method 'gptq'"):
        recipe = Recipe("iq2", spec=IQ2XXS(), method=GPTQ, include=("*.q_proj",))
        make(example_checkpoint, recipe, tmp_path / "o", None)
    (tmp_path / "wrong.yaml").write_text("format: int4\nmethod: magic\n")
    with pytest.raises(
        UserError, match=r"line 2: `method` is one of data-free, gptq, awq, awq-gptq; not 'magic'"
    ):
        load_recipe(tmp_path / "wrong.yaml")


def test_shipped_recipes_say_their_method() -> None:
    calibrated = ("int4-gptq", "nvfp4-gptq", "mxfp4-gptq")
    assert all(load_recipe(name).method == GPTQ for name in calibrated)
    assert load_recipe("int4-hqq").method == "data-free"


def test_the_output_projection_is_solved_too(small: Path, heldout_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("head", spec=Int4(64), method=GPTQ, lm_head="quantize")
    artifact = make(small, recipe, tmp_path / "out", heldout_text)
    assert "output_error" in artifact.quantization["modules"]["lm_head"]
    assert open_checkpoint(tmp_path / "out").config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Int8(WHOLE_ROW), "GPTQ and AWQ need groups; got INT8 per row"),
        (FP8("block"), "GPTQ needs one scale for a row or for all; got FP8, blocks"),
        (
            Int4(64, zero_point="fractional"),
            "GPTQ and AWQ need integer zero points; got INT4",
        ),
    ],
    ids=str,
)
def test_what_no_method_rounds_is_refused_by_name(
    example_checkpoint: Path, tmp_path: Path, spec: WeightFormat, said: str
) -> None:
    export = "torchao" if isinstance(spec, Int4) else None
    with pytest.raises(UserError, match=said):
        quantize(example_checkpoint, Recipe("r", spec=spec, method=GPTQ), tmp_path / "o", export=export)


def test_a_layer_whose_columns_do_not_go_together_is_named(example_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    made(source, example_checkpoint, "qwen3", intermediate_size=200)
    recipe = Recipe("fp8", spec=FP8(), method=GPTQ)
    with pytest.raises(UserError, match=r"down_proj: gptq rounds 16 columns together, and K = 200 is no"):
        make(source, recipe, tmp_path / "out", None)


def test_attention_in_fp8_is_rounded_beside_nvfp4(
    two_layers: Path, heldout_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_calibration, "can_draw", lambda *_: False)
    recipe = Recipe("mixed", spec=NVFP4(), rules=load_recipe("nvfp4-fp8").rules, method=GPTQ)
    modules = make(two_layers, recipe, tmp_path / "out", heldout_text).quantization["modules"]
    for kind, of_format in (("self_attn", "fp8"), ("mlp", "nvfp4")):
        found = [module for name, module in modules.items() if f".{kind}." in name]
        assert len(found) > 5 and {module["format"]["format"] for module in found} == {of_format}
        errors = [module["output_error"] for module in found]
        assert sum(error["calibrated"] for error in errors) < 0.8 * sum(
            error["data_free"] for error in errors
        )


def test_errors_are_recorded_against_the_source_in_later_layers_too(small: Path, tmp_path: Path) -> None:
    """A later layer is rounded for weights that make up for earlier ones; its error is not of those."""
    artifact = quantize(small, RECIPE, tmp_path / "out", progress=False)
    found = compare_weights(
        open_checkpoint(tmp_path / "out"), open_checkpoint(small), artifact, progress=False
    )
    assert found is not None and check_weights(found.figures).status == "pass"
