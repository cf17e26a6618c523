"""The chooser picks by the measured curve, does not waver, remembers, and refuses what is wrong."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.base.installed import kernel_versions
from scalegate.layouts.choosing import choose as choose_module
from scalegate.layouts.choosing.choose import choose, default_layout, default_ms, pick
from scalegate.layouts.choosing.explain import explain_slow_layout
from scalegate.layouts.choosing.measure import ShapeMeasurements, measure
from scalegate.layouts.choosing.measurement_cache import source_digest
from scalegate.layouts.choosing.plan import LayoutPlan, Measurement, device_name
from scalegate.layouts.choosing.time_limit import OutOfTime, time_limit
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, PackedWeight, Problem

CPU = torch.device("cpu")
QUICK = TimingBudget(samples=6, sample_seconds=0.0002)


def problem(n: int = 64, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(Int4(64), n, k, dtype, CPU)


def curves(**ratios: list[float]) -> ShapeMeasurements:
    """Measurements at M=1, 2, 4, … with these speeds, the unquantized product at 100 µs."""
    measurements = [
        Measurement(layout, f"{layout} kernel", 1 << step, 100.0 / ratio, 100.0)
        for layout, curve in ratios.items()
        for step, ratio in enumerate(curve)
    ]
    return ShapeMeasurements(measurements)


def picked(**ratios: list[float]) -> str:
    return pick("shape", ("layer",), curves(**ratios)).layout


@dataclass
class AlteredLayout:
    """A layout as it is but for one thing: slower, wrong, or broken."""

    inner: str
    name: str
    repeats: int = 1
    factor: float = 1.0
    breaks: bool = False
    breaks_again_at: int | None = None
    """An M at which every call but the first fails."""
    kernel: str = "an altered kernel"
    calls: list[int] = field(default_factory=list)

    def refuses(self, problem: Problem) -> str | None:
        return LAYOUTS[self.inner].refuses(problem)

    def pack(self, weight, dtype) -> PackedWeight:
        return replace(LAYOUTS[self.inner].pack(weight, dtype), layout=self.name)

    def matmul(self, x, packed):
        self.calls.append(x.shape[0])
        if self.breaks or (x.shape[0] == self.breaks_again_at and self.calls.count(x.shape[0]) > 1):
            raise RuntimeError("no kernel image is available for execution on the device")
        for _ in range(self.repeats):
            y = LAYOUTS[self.inner].matmul(x, packed)
        return y * self.factor


def tuning_for_ever(*arguments):
    """As an autotuner that shrugs off whatever goes wrong with one configuration."""
    for _ in range(100):
        try:
            time.sleep(0.05)
        except Exception:
            continue


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine two threads wait for each other, and every layout measures alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def with_layout(monkeypatch):
    """Registers an altered layout first in the order of preference, for one test."""

    def add(layout: AlteredLayout) -> AlteredLayout:
        monkeypatch.setattr(LAYOUTS, "_entries", {layout.name: layout} | LAYOUTS._entries)
        return layout

    return add


def test_the_highest_mean_wins_where_nothing_loses():
    assert picked(tinygemm=[1.2, 1.2, 1.2], dequantize=[2.0, 1.5, 1.0]) == "dequantize"


def test_a_layout_that_collapses_at_a_large_m_is_not_picked_for_its_mean():
    """pytorch/ao #3496: quick at M=1, and far below the unquantized product from M=8."""
    collapsing = [9.0, 4.0, 2.0, 0.5]
    assert picked(tinygemm=collapsing, dequantize=[1.1, 1.1, 1.1, 1.0]) == "dequantize"
    assert picked(tinygemm=collapsing) == "tinygemm"


def test_where_every_layout_loses_the_least_loss_at_the_worst_m_wins():
    assert picked(tinygemm=[3.0, 1.0, 0.1], dequantize=[0.5, 0.5, 0.5]) == "dequantize"


def test_layouts_that_measure_alike_are_told_apart_by_preference_alone():
    """Noise of a percent either way must not change the pick; a real difference must."""
    generator = torch.Generator().manual_seed(7)
    picks = set()
    for _ in range(50):
        noise = 1 + 0.01 * (2 * torch.rand(2, 6, generator=generator) - 1)
        first, second = (noise * 1.5).tolist()
        picks.add(picked(cpu_int4=first, dequantize=second))
    assert picks == {"cpu_int4"}
    assert picked(cpu_int4=[1.5] * 6, dequantize=[1.6] * 6) == "dequantize"


def test_a_layout_made_slow_is_measured_slow_and_not_picked(with_layout):
    with_layout(AlteredLayout("cpu_int4", "slow", repeats=20))
    found = measure(problem(256, 256), (1, 8), ["slow", "cpu_int4"], QUICK)
    times = {
        (measurement.layout, measurement.m): measurement.microseconds for measurement in found.measurements
    }
    assert times["slow", 8] > 3 * times["cpu_int4", 8]
    assert pick("shape", (), found).layout == "cpu_int4"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (AlteredLayout("dequantize", "scaled", factor=1.2), "wrong answer here: relative error 0."),
        (AlteredLayout("dequantize", "silent", factor=float("nan")), "wrong answer here: relative error nan"),
        (AlteredLayout("dequantize", "broken", breaks=True), "failed here: RuntimeError: no kernel image"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_layout_that_is_wrong_on_this_device_is_refused_with_the_reason(with_layout, layout, reason):
    with_layout(layout)
    found = measure(problem(), (1, 4), [layout.name, "dequantize"], QUICK)
    assert found.refusals[layout.name].startswith(reason)
    assert {measurement.layout for measurement in found.measurements} == {"dequantize"}


def test_a_layout_that_fails_only_when_it_is_timed_is_refused_and_the_others_are_timed(with_layout):
    """As a kernel that cannot be captured; its answers, and its timing at the first M, were fine."""
    with_layout(AlteredLayout("dequantize", "fails", breaks_again_at=4))
    found = measure(problem(), (1, 4), ["fails", "dequantize"], QUICK)
    assert found.refusals["fails"].startswith("failed here: RuntimeError: no kernel image")
    assert [(measurement.layout, measurement.m) for measurement in found.measurements] == [
        ("dequantize", 1),
        ("dequantize", 4),
    ]


@pytest.mark.parametrize("stuck_in", ["pack", "matmul"])
def test_a_layout_that_is_not_ready_in_time_is_refused_and_the_others_are_timed(with_layout, stuck_in):
    layout = with_layout(AlteredLayout("dequantize", "tuning"))
    setattr(layout, stuck_in, tuning_for_ever)
    allowance = {"tuning": 0.2}
    found = measure(problem(), (1, 4), ["tuning", "dequantize"], QUICK, allowance=allowance)
    assert found.refusals["tuning"].startswith("not ready in time here")
    assert {measurement.layout for measurement in found.measurements} == {"dequantize"}
    assert allowance == {"tuning": 0}
    again = measure(problem(32), (1, 4), ["tuning", "dequantize"], QUICK, allowance=allowance)
    assert "tuning" in again.refusals


def test_a_layout_that_is_ready_in_time_keeps_the_rest_of_it():
    allowance = {"dequantize": 60.0}
    found = measure(problem(), (1,), ["cpu_int4", "dequantize"], QUICK, allowance=allowance)
    assert {measurement.layout for measurement in found.measurements} == {"cpu_int4", "dequantize"}
    assert 30 < allowance["dequantize"] < 60 and list(allowance) == ["dequantize"]


def test_a_layout_that_takes_too_long_for_one_shape_gets_no_time_for_the_next(with_layout):
    layout = with_layout(AlteredLayout("dequantize", "tuning"))
    sound, layout.pack = layout.pack, tuning_for_ever
    allowance = {"tuning": 60.0}
    first = measure(problem(), (1,), ["tuning", "dequantize"], QUICK, allowance=allowance, longest=0.2)
    layout.pack = sound
    second = measure(problem(32), (1,), ["tuning", "dequantize"], QUICK, allowance=allowance, longest=0.2)
    for found in (first, second):
        assert found.refusals["tuning"].startswith("not ready in time here")


def test_a_limit_leaves_the_alarm_of_others_as_it_was():
    ended = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: ended.append(number))
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        with pytest.raises(OutOfTime), time_limit(0.05):
            time.sleep(50)
        assert not ended
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left < 99.96, "what was left of its time, less ours"
        signal.raise_signal(signal.SIGALRM)
        assert ended == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_outside_the_main_thread_nothing_is_interrupted():
    def work() -> str:
        with time_limit(0.01):
            time.sleep(0.05)
        return "done"

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result() == "done"


def test_a_plan_covers_every_shape_once_with_all_its_modules():
    asked = {"a.q": problem(64), "b.q": problem(64), "a.k": problem(32)}
    of_every_cpu = ["cpu_int4", "dequantize", "cpu_int4_float32", "cpu_int4_tiles"]
    amx = LAYOUTS["cpu_int4_amx"]
    plan = choose(asked, (1, 2), progress=False)
    assert [choice.modules for choice in plan.choices] == [("a.q", "b.q"), ("a.k",)]
    for choice in plan.choices:
        assert choice.measured_layouts == of_every_cpu + ([] if amx.refuses(problem(64)) else [amx.name])
        assert set(choice.refusals) == set(LAYOUTS) - set(choice.measured_layouts)
        assert [measurement.m for measurement in choice.curve("cpu_int4").values()] == [1, 2]
    assert plan.layout_for(problem(32)) == plan.choices[1].layout
    assert plan.layout_for(problem(48)) is None


def test_a_plan_survives_json():
    plan = choose({"layer": problem()}, (1, 2), progress=False)
    assert LayoutPlan.from_json(plan.to_json()) == plan


def test_measurements_are_kept_and_fresh_measures_again(monkeypatch):
    measured = []

    def counting(problem, ms, layouts, **kwargs):
        measured.append(problem.n)
        return measure(problem, ms, layouts, QUICK)

    monkeypatch.setattr(choose_module, "measure", counting)
    first = choose({"layer": problem()}, (1, 2), progress=False)
    assert choose({"layer": problem()}, (1, 2), progress=False) == first
    assert measured == [64]
    choose({"layer": problem()}, (1, 2), fresh=True, progress=False)
    choose({"layer": problem()}, (1, 4), progress=False)
    assert measured == [64, 64, 64]


@pytest.mark.parametrize(
    "changed", ["kernels/append.py", "kernels/hopper/stream_k.py", "layouts/choosing/choose.py"]
)
def test_what_is_cached_is_not_for_another_source(changed, tmp_path):
    for name in (
        "kernels/append.py",
        "kernels/hopper/stream_k.py",
        "layouts/choosing/choose.py",
        "pipeline/cli.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one", encoding="utf-8")
    before = source_digest(tmp_path)
    (tmp_path / "pipeline/cli.py").write_text("two", encoding="utf-8")
    assert source_digest(tmp_path) == before
    (tmp_path / changed).write_text("two", encoding="utf-8")
    assert source_digest(tmp_path) != before


def test_a_damaged_cache_is_as_good_as_none(tmp_path):
    choose({"layer": problem()}, (1,), progress=False)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text("{", encoding="utf-8")
    assert choose({"layer": problem()}, (1,), progress=False).choices[0].measurements


def test_a_forced_layout_is_recorded_with_what_would_have_been_better(with_layout):
    with_layout(AlteredLayout("cpu_int4", "slow", repeats=20))
    plan = choose({"layer": problem(256, 256)}, (1, 8), force="slow", progress=False)
    (choice,) = plan.choices
    assert choice.forced and choice.layout == "slow" and choice.reason == "forced by the user"
    (slow,) = explain_slow_layout(plan, 0.95)
    assert slow.kernel == "an altered kernel" and "256x256" in slow.sentence(0.95)
    assert slow.better_layout in LAYOUTS and slow.better_layout != "slow"
    assert slow.better_ratio > slow.worst_ratio


def test_a_forced_layout_of_dense_layers_leaves_experts_to_be_chosen():
    layers = {"up": problem(), "experts.up": replace(problem(), experts=Experts(4, 2))}
    plan = choose(layers, (1,), force="cpu_int4_float32", progress=False)
    assert [(choice.modules, choice.forced) for choice in plan.choices] == [
        (("up",), True),
        (("experts.up",), False),
    ]
    assert plan.choices[1].layout in plan.choices[1].measured_layouts
    plan = choose(layers, (1,), force="dequantize_per_expert", progress=False)
    assert [choice.forced for choice in plan.choices] == [False, True]
    assert plan.choices[1].layout == "dequantize_per_expert"
    with pytest.raises(UserError, match="is for experts only"):
        choose({"up": problem()}, (1,), force="dequantize_per_expert", progress=False)


def test_a_layout_that_cannot_serve_cannot_be_forced():
    with pytest.raises(UserError, match=r"'tinygemm' does not serve layer \(.*64x128.*\): is for CUDA"):
        choose({"layer": problem()}, (1,), force="tinygemm", progress=False)
    with pytest.raises(UserError, match=r"unknown layout 'marlin'; choose one of: .*dequantize"):
        choose({"layer": problem()}, (1,), force="marlin", progress=False)


@pytest.mark.parametrize(("asked", "ms"), [({}, None), ({"layer": problem()}, (0, 1))])
def test_nothing_to_choose_and_an_impossible_m_are_user_errors(asked, ms):
    with pytest.raises(UserError):
        choose(asked, ms, progress=False)


def test_the_first_m_that_loses_is_named_and_a_layout_that_would_have_passed():
    choice = pick(
        "shape",
        ("a", "b"),
        curves(tinygemm=[3.0, 1.2, 0.7, 0.3], cpu_int4=[1.1, 1.1, 1.0, 1.0], dequantize=[5.0, 5.0, 0.9, 5.0]),
        force="tinygemm",
    )
    (slow,) = explain_slow_layout(LayoutPlan("device", {}, (choice,)), 0.95)
    assert (slow.layout, slow.kernel, slow.modules) == ("tinygemm", "tinygemm kernel", 2)
    assert (slow.m, round(slow.ratio, 3), slow.worst_m, round(slow.worst_ratio, 3)) == (4, 0.7, 8, 0.3)
    assert (slow.better_layout, slow.better_ratio) == ("cpu_int4", 1.0)
    assert "from M=4, 0.30× at M=8" in slow.sentence(0.95)
    assert "cpu_int4 would have passed" in slow.sentence(0.95)


def test_a_plan_that_is_nowhere_slow_has_nothing_to_explain():
    choice = pick("shape", ("a",), curves(tinygemm=[1.0, 1.2]))
    assert explain_slow_layout(LayoutPlan("device", {}, (choice,)), 0.95) == []


def test_where_no_layout_reaches_the_floor_the_nearest_is_named():
    choice = pick("shape", ("a",), curves(tinygemm=[0.5], dequantize=[0.8]), force="tinygemm")
    (slow,) = explain_slow_layout(LayoutPlan("device", {}, (choice,)), 0.95)
    assert slow.better_layout == "dequantize" and "is nearest to it" in slow.sentence(0.95)


def test_a_plan_matches_only_the_device_and_versions_it_was_made_with():
    plan = LayoutPlan(device_name(CPU), kernel_versions())
    assert plan.matches(CPU)
    assert not plan.matches(CPU, kernel_versions() | {"torch": "2.0.0"})
    assert not LayoutPlan("NVIDIA H200", kernel_versions()).matches(CPU)


def test_a_plan_covers_what_it_timed_in_that_layout_dtype_and_device():
    layers = {"up": problem(), "down": problem(128, 64)}
    plan = choose(layers, ms=(1,), progress=False)
    layouts = {name: plan.layout_for(problem) for name, problem in layers.items()}
    assert plan.covers(layers, layouts) and plan.covers(layers, {})
    assert not plan.covers(layers, {**layouts, "up": "swap_ab"})
    assert not plan.covers({"up": layers["up"]}, layouts), "a layer that is no problem here"
    assert not plan.covers({**layers, "up": problem(dtype=torch.float32)}, layouts)
    elsewhere = LayoutPlan("another device x2", plan.versions, plan.choices)
    assert not elsewhere.covers(layers, layouts)


def test_unmeasured_layers_get_the_first_layout_that_serves_them_exactly():
    assert default_layout(problem(dtype=torch.bfloat16)) == "cpu_int4"
    assert default_layout(problem(dtype=torch.float32)) == "dequantize"
    assert default_layout(Problem(NVFP4(), 64, 64, torch.bfloat16, CPU)) == "cpu_dequantized"
    assert default_ms(CPU) == (1, 2, 4, 8, 16, 32)


def test_a_hopeless_contestant_is_sampled_less_and_still_timed():
    calls: list[int] = []

    def quick(copy: int) -> None:
        return None

    def slow(copy: int) -> None:
        calls.append(copy)
        torch.randn(200, 200) @ torch.randn(200, 200)

    budget = TimingBudget(samples=24, sample_seconds=0.0)
    figures = interleaved_microseconds({"quick": quick, "slow": slow}, 2, CPU, budget)
    assert figures["slow"] > 4 * figures["quick"] > 0
    assert len(calls) < 12
