"""`pipeline layout`: the plan is measured here, kept in the artifact, and followed when it is loaded."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.layouts.choosing import choose as choose_module
from scalegate.layouts.choosing.measure import measure
from scalegate.layouts.choosing.plan import LayoutPlan, Measurement, ShapeChoice
from scalegate.layouts.choosing.timing import TimingBudget
from scalegate.layouts.choosing.tried import tried_of
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Layout, PackedWeight
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.artifact import MANIFEST_NAME, Artifact
from scalegate.pipeline.report.layout_table import layout_table

SHAPES = 4
"""q and o, k and v, gate and up, down."""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, two_layers):
    folder = tmp_path_factory.mktemp("layout") / "artifact"
    quantize(two_layers, "int4-hqq-g64", folder, progress=False)
    return folder


@pytest.fixture
def artifact(quantized, tmp_path):
    return shutil.copytree(quantized, tmp_path / "artifact")


@pytest.fixture(autouse=True)
def quick_and_counted(monkeypatch, tmp_path):
    """Real measurements with few samples, a cache of their own, and a list of what was measured."""
    monkeypatch.setenv("SCALEGATE_CACHE", str(tmp_path / "cache"))
    measured = []

    def quick(problem, ms, layouts, **settings):
        measured.append((problem.n, problem.k))
        budget = TimingBudget(samples=5, sample_seconds=0.0002)
        return measure(problem, ms, layouts, budget, **settings)

    monkeypatch.setattr(choose_module, "measure", quick)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield measured
    torch.set_num_threads(before)


def run(*arguments):
    return CliRunner().invoke(main, ["layout", "--no-kv", *map(str, arguments)])


def test_the_plan_is_written_into_the_artifact_and_nothing_else_changes(artifact):
    before = Artifact.read(artifact)
    result = layout(artifact, ms=(1, 4), progress=False)
    after = Artifact.read(artifact)
    assert result.stored and result.measured
    assert LayoutPlan.from_json(after.layout_plan) == result.plan
    assert len(result.plan.choices) == SHAPES
    before.layout_plan = after.layout_plan
    assert before == after
    assert after.changed_files(artifact) == []


def test_a_plan_made_here_stands_and_is_not_measured_again(artifact, quick_and_counted):
    first = layout(artifact, ms=(1, 4), progress=False)
    assert len(quick_and_counted) == SHAPES
    again = layout(artifact, ms=(1, 4), progress=False)
    assert not again.measured and again.plan == first.plan
    assert layout(artifact, ms=(4,), progress=False).measured is False
    assert len(quick_and_counted) == SHAPES
    layout(artifact, ms=(1, 4), fresh=True, progress=False)
    assert len(quick_and_counted) == 2 * SHAPES


@pytest.mark.parametrize("change", [{"device": "NVIDIA H200"}, {"versions": {"torch": "1.0"}}])
def test_a_plan_from_elsewhere_is_measured_again(artifact, change):
    layout(artifact, ms=(1,), progress=False)
    manifest = Artifact.read(artifact)
    manifest.layout_plan |= change
    manifest.write(artifact)
    result = layout(artifact, ms=(1,), progress=False)
    assert result.measured
    assert LayoutPlan.from_json(Artifact.read(artifact).layout_plan) == result.plan


def test_another_plan_lets_the_verdict_go_and_a_standing_one_keeps_it(artifact):
    layout(artifact, ms=(1, 4), progress=False)
    manifest = Artifact.read(artifact)
    manifest.verdict_sha256 = "0" * 64
    manifest.write(artifact)
    layout(artifact, ms=(1, 4), progress=False)
    assert Artifact.read(artifact).verdict_sha256 == "0" * 64
    result = layout(artifact, ms=(1, 4), force="dequantize", progress=False)
    assert Artifact.read(artifact).verdict_sha256 is None
    assert "pipeline validate" in result.note


def test_a_plan_made_with_other_threads_is_followed_and_one_from_another_processor_is_not(artifact):
    """A server has fewer threads than who laid the artifact out, and has to serve what was validated."""
    layout(artifact, ms=(1,), force="dequantize", progress=False)
    manifest = Artifact.read(artifact)
    made_on, _, threads = manifest.layout_plan["device"].rpartition(" x")
    assert threads == "1"
    for device, expected in ((f"{made_on} x64", "dequantize"), ("another processor x1", "cpu_int4")):
        manifest.layout_plan |= {"device": device}
        manifest.write(artifact)
        assert set(load_model(artifact, progress=False).layouts.values()) == {expected}


class SlowLayout:
    def __init__(self, layout: Layout):
        self.layout = layout

    def __getattr__(self, name: str) -> object:
        return getattr(self.layout, name)

    def matmul(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        for _ in range(19):
            self.layout.matmul(x, packed)
        return self.layout.matmul(x, packed)


def test_a_forced_layout_serves_and_the_table_says_what_is_better(artifact, monkeypatch):
    """A layout as bad as the one of pytorch/ao #3496, on any CPU, and then the artifact laid out again."""
    monkeypatch.setitem(LAYOUTS._entries, "cpu_int4_float32", SlowLayout(LAYOUTS["cpu_int4_float32"]))
    result = layout(artifact, ms=(8,), force="cpu_int4_float32", progress=False)
    assert all(choice.forced for choice in result.plan.choices)
    table = layout_table(result.plan, result.tried)
    assert result.tried == {} and "such a GPU" not in table
    assert "> cpu_int4_float32" in table
    assert "_weight_int4pack_mm_for_cpu (float32)" in table
    assert " would have passed" in table or " is nearest to it" in table
    assert set(load_model(artifact, progress=False).layouts.values()) == {"cpu_int4_float32"}

    laid_again = layout(artifact, ms=(8,), progress=False)
    chosen = {choice.layout for choice in laid_again.plan.choices}
    assert "cpu_int4_float32" not in chosen
    assert set(load_model(artifact, progress=False).layouts.values()) == chosen


def test_the_table_says_how_our_kernels_were_tried_on_such_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    names = ("int4_portable", "tinygemm")
    measured = tuple(Measurement(name, "kernel", 1, 10.0, 20.0) for name in names)
    choice = ShapeChoice("int4 g128 zp 512x256 bfloat16", names[0], ("q_proj",), measured)
    plan = LayoutPlan("an RTX 4090", {}, (choice,))
    tried = tried_of(plan, torch.device("cuda", 0))
    assert tried == {"int4_portable": "run through translation"}
    assert "  int4_portable: run through translation" in layout_table(plan, tried).splitlines()


def test_the_table_names_the_layouts_that_could_serve_this_format_here(artifact):
    """The other layouts, for other formats and devices, are named with --verbose and in JSON."""
    usual, verbose = run(artifact, "--m", "1"), run(artifact, "--m", "1", "--verbose")
    refusals = json.loads(run(artifact, "--m", "1", "--json").stdout)["choices"][0]["refusals"]
    for name, reason in refusals.items():
        line = f"    {name}: not measured, {reason}\n"
        assert line in verbose.stdout
        assert (line in usual.stdout) == (not reason.startswith("is for"))
    assert "    cpu_int4_cast: not measured, takes float16 or float32 activations" in usual.stdout
    assert len(usual.stdout.splitlines()) <= SHAPES * 12
    assert len(verbose.stdout.splitlines()) > SHAPES * 40


def test_a_checkpoint_that_is_not_ours_is_measured_and_left_alone(artifact):
    (artifact / MANIFEST_NAME).unlink()
    before = {path: path.stat().st_mtime_ns for path in artifact.iterdir()}
    done = run(artifact, "--m", "1")
    assert done.exit_code == 0, done.output
    assert "cpu_int4" in done.output and "The plan was not stored" in done.output
    assert {path: path.stat().st_mtime_ns for path in artifact.iterdir()} == before


def test_json_goes_to_stdout_alone(artifact):
    done = run(artifact, "--m", "1,2", "--json")
    value = json.loads(done.stdout)
    assert value["stored"] is True and len(value["choices"]) == SHAPES
    assert "scalegate.json" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "marlin"], "unknown layout 'marlin'; choose one of:"),
        (["--layout", "tinygemm"], "'tinygemm' does not serve model.layers.0"),
        (["--m", "0,1"], "M=0"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_one_message(artifact, arguments, message):
    if arguments[1] == "cuda" and torch.cuda.is_available():
        message = "The plan is in"
    done = run(artifact, *arguments)
    assert message in done.output and "Traceback" not in done.output
    assert done.exit_code == (0 if message == "The plan is in" else 2)


def test_an_unquantized_checkpoint_has_no_layout_to_choose(two_layers):
    with pytest.raises(UserError, match="no quantized linear layer"):
        layout(two_layers, progress=False)
