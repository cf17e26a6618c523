"""Which KV format pays, from which context on: timed through its own storage, and kept in the plan."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click import Option
from click.testing import CliRunner
from scalegate.layouts.choosing import timing
from scalegate.layouts.choosing.plan import KVMeasurement, LayoutPlan
from scalegate.layouts.kv.format import KV_FORMATS, TokenByToken
from scalegate.pipeline.cli.layout import command
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.layout import CONTEXTS, CUDA_CONTEXTS, LayoutResult, layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.report.kv_table import kv_table, pays
from scalegate.serving_check.checks.diagnosis import kv_sentence
from scalegate.serving_check.engine.offline import kv_timing

FLUSH_SECONDS = 0.016


class Clock:
    """One that goes by pauses, and by a microsecond whenever it is asked: no other process is in it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class SlowAtAPageEnd(TokenByToken):
    """Unquantized, but for a pause whenever a page becomes full."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def allocate(self, *arguments):
        layer = super().allocate(*arguments)
        forward = layer.forward

        def pausing(query, key, value, metadata, *rest):
            if not all(metadata.host.seq_lens[: metadata.host.num_decodes] % metadata.page_size):
                self._clock.now += FLUSH_SECONDS
            return forward(query, key, value, metadata, *rest)

        layer.forward = pausing
        return layer


@pytest.fixture
def two_formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))
    kept = {"unquantized": KV_FORMATS["unquantized"], "slow_pages": SlowAtAPageEnd(clock)}
    monkeypatch.setattr(KV_FORMATS, "_entries", kept)
    yield


def test_a_flush_is_counted_once_in_a_page(example_checkpoint: Path, two_formats: None):
    result = layout(example_checkpoint, kv=True, ms=(2,), contexts=(64,), device="cpu", progress=False)
    [measurement] = result.plan.kv
    layers, page = 4, 16
    lost = measurement.microseconds - measurement.baseline_microseconds
    assert lost == pytest.approx(layers * FLUSH_SECONDS * 1e6 / page, rel=0.01)
    assert pays(result.plan) == ["slow_pages pays nowhere"] and "slow_pages" in kv_table(result.plan, {})


WRITING = "is spent writing full pages"


def test_writing_pages_is_named_where_most_of_the_time_goes_into_it(
    example_checkpoint: Path, two_formats: None
):
    result = layout(example_checkpoint, kv=True, ms=(2,), contexts=(64,), device="cpu", progress=False)
    [measurement] = result.plan.kv
    assert measurement.full_page_microseconds == pytest.approx(4 * FLUSH_SECONDS * 1e6, rel=0.01)
    assert f"% of the extra time {WRITING}: a step that" in kv_sentence(measurement)


@pytest.mark.parametrize(
    ("plain", "full"),
    [(900.0, 2500.0), (120.0, 180.0), (None, None)],
    ids=["attending takes most", "no slower than noise", "a plan from before"],
)
def test_writing_pages_is_not_blamed_for_what_it_does_not_take(plain: float | None, full: float | None):
    mean = 1000.0 if plain is None or full is None else plain + (full - plain) / 16
    said = kv_sentence(KVMeasurement("packed", 128, 1, mean, 119.0, plain, full))
    assert "storing and attending takes" in said and WRITING not in said
    assert WRITING in kv_sentence(KVMeasurement("packed", 128, 1, 1100.0, 100.0, 120.0, 16000.0))


def test_the_plan_keeps_it_and_stands(example_checkpoint: Path, two_formats: None, tmp_path: Path):
    recipe = tmp_path / "kv.yaml"
    recipe.write_text("format: unquantized\nkv_cache: slow_pages\n")
    folder = tmp_path / "artifact"
    quantize(example_checkpoint, recipe, folder, progress=False)
    words = ["layout", str(folder), "--m", "1,2", "--contexts", "32,8192", "--device", "cpu", "--json"]
    printed = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert {(measurement["context"], measurement["m"]) for measurement in printed["kv"]} == {
        (32, 1),
        (32, 2),
        (8192, 1),
        (8192, 2),
    }
    assert printed["kv_pays"] and printed["choices"] == []
    recorded = LayoutPlan.from_json(Artifact.read(folder).layout_plan or {})
    assert [vars(measurement) for measurement in recorded.kv] == printed["kv"]
    assert not layout(folder, kv=True, ms=(1, 2), contexts=(32,), device="cpu", progress=False).measured
    assert layout(folder, kv=True, ms=(1, 4), contexts=(32,), device="cpu", progress=False).measured


def test_a_context_that_was_not_asked_for_before_is_timed(
    example_checkpoint: Path, two_formats: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = tmp_path / "kv.yaml"
    recipe.write_text("format: unquantized\nkv_cache: slow_pages\n")
    folder = tmp_path / "artifact"
    quantize(example_checkpoint, recipe, folder, progress=False)

    def again(*contexts: int, **options: bool) -> LayoutResult:
        return layout(folder, kv=True, ms=(1,), contexts=contexts, device="cpu", progress=False, **options)

    assert again(32, 64).measured and not again(64).measured
    more = again(32, 128)
    assert more.measured and [measurement.context for measurement in more.plan.kv] == [32, 128]

    monkeypatch.setattr(kv_timing, "free_memory", lambda device: 4 << 20)
    short = again(32, 8192, fresh=True)
    assert [measurement.context for measurement in short.plan.kv] == [32] and short.plan.kv_left_out == (
        (8192, 1),
    )
    assert "No memory to time 8,192 tokens at M=1" in kv_table(short.plan, {})
    assert "such a GPU" not in kv_table(short.plan, short.kv_tried), "a CPU"
    assert kv_table(short.plan, {"nvfp4": "compiled only"}).endswith("before:\n  nvfp4: compiled only")
    stands = again(32, 8192)
    assert not stands.measured and stands.plan == short.plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", "0"], "--contexts 0: a context is a number of tokens"),
        (["--m", "0,1"], "M=0: M is a number of requests"),
        (["--contexts", "128,999999"], "--contexts 999999 is more than the 8192 tokens of"),
        (["--contexts", "128", "--no-kv"], "--no-kv times none; leave one of the two out"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(example_checkpoint: Path, words: list[str], said: str):
    ran = CliRunner().invoke(main, ["layout", str(example_checkpoint), "--device", "cpu", *words])
    assert ran.exit_code == 2 and said in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.output


def test_help_shows_the_contexts_that_are_timed_by_default():
    [option] = [parameter for parameter in command.params if parameter.name == "contexts"]
    extra = set(CUDA_CONTEXTS) - set(CONTEXTS)
    said = f"default: {','.join(map(str, CONTEXTS))}; on CUDA also {','.join(map(str, extra))}"
    assert isinstance(option, Option) and said in (option.help or "")


def test_a_format_pays_from_where_it_is_no_slower_any_more():
    ratios = {128: 1.1, 1024: 0.9, 4096: 1.2, 16384: 2.0}
    measured = [
        KVMeasurement("packed", context, 8, 100.0, 100.0 * ratio) for context, ratio in ratios.items()
    ]
    measured.append(KVMeasurement("packed", 128, 1, 100.0, 50.0))
    plan = LayoutPlan("a device", {}, (), tuple(measured))
    assert plan.pays_from("packed", 8) == 4096 and plan.pays_from("packed", 1) is None
    assert pays(plan) == ["packed pays from 4,096 tokens on at M=8; not at M=1"]
