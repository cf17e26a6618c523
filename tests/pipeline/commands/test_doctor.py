"""`pipeline doctor` answers on one screen without a request, and gives a reason for everything it lacks."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from scalegate.layouts.choosing import measurement_cache
from scalegate.layouts.choosing.measure import ShapeMeasurements
from scalegate.layouts.choosing.plan import Measurement
from scalegate.layouts.choosing.tried import MARKS
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.input_format import dynamic_input
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.packing import trial
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands import doctor as doctor_module
from scalegate.pipeline.commands.doctor import doctor

LINES, COLUMNS = 24, 80
H100, A100 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))
RTX_4090, RTX_5090 = ("NVIDIA GeForce RTX 4090", (8, 9)), ("NVIDIA GeForce RTX 5090", (12, 0))
B200 = ("NVIDIA B200", (10, 0))
CPU, INT4 = torch.device("cpu"), Int4()


def output(*words: str) -> str:
    result = CliRunner().invoke(main, ["doctor", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def told() -> dict[str, Any]:
    return json.loads(output("--json"))


def weights(screen: str) -> dict[str, dict[str, list[str]]]:
    """Each table by its heading: the cells beside each format."""
    tables: dict[str, dict[str, list[str]]] = {}
    for block in screen.split("\n\n"):
        heading, *rows = [re.split(r" {2,}", line) for line in block.splitlines()]
        if heading[0].startswith("weights on "):
            tables[heading[0]] = {row[0]: row[1:] for row in rows if len(row) == len(heading)}
    return tables


@pytest.fixture
def gpus(monkeypatch) -> Callable[..., None]:
    """Puts GPUs in torch's place that have names, a compute capability and kernels that run."""

    def pretend(*models: tuple[str, tuple[int, int]]) -> None:
        def model(device: torch.device | None = None) -> tuple[str, tuple[int, int]]:
            return models[0 if device is None or device.index is None else device.index]

        answers = {
            "is_available": lambda: True,
            "device_count": lambda: len(models),
            "get_device_name": lambda device=None: model(device)[0],
            "get_device_capability": lambda device=None: model(device)[1],
            "mem_get_info": lambda device=None: (79_100_000_000, 85_000_000_000),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(trial, "REASONS", {})
        monkeypatch.setattr(trial, "failure", lambda layout, problem: "")

    return pretend


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(measurement_cache.CACHE_VARIABLE, str(tmp_path / "cache"))


def keep(
    ratios: dict[str, list[float]],
    n: int = 512,
    spec: WeightFormat = INT4,
    dtype: torch.dtype = torch.bfloat16,
    experts: Experts | None = None,
) -> None:
    """Leave in the cache what `pipeline layout` does: each layout's speed at M=1, 2, ..."""
    problem = Problem(spec, n, 256, dtype, CPU, experts)
    measurements = [
        Measurement(layout, "kernel", m, 1.0, ratio)
        for layout, speeds in ratios.items()
        for m, ratio in enumerate(speeds, 1)
    ]
    ms = range(1, 1 + len(next(iter(ratios.values()))))
    measurement_cache.store(problem, list(ms), list(LAYOUTS), ShapeMeasurements(measurements))


def test_it_fits_on_one_screen_which_names_what_serves_each_format(empty_cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = output().splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    [(heading, rows)] = weights("\n".join(lines)).items()
    assert heading == "weights on cpu"
    specs = [spec.key for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    assert list(rows) == sorted(specs)
    assert rows["int4 g128 zp"] == ["cpu_int4", "unmeasured", "per expert"]
    assert rows["unquantized"][:2] == ["torch_linear", "1.00"]
    assert "to measure speeds: pipeline layout MODEL" in lines


def test_the_matrix_of_refusals_is_shown_when_asked_for():
    usual, verbose = output(), output("--verbose")
    assert weights(verbose) == weights(usual) != {}
    refusals = {state["refusal"] for state in told()["layouts"]} - {None}
    assert len(refusals) > 10
    assert all(refusal in verbose for refusal in refusals)
    assert not any(refusal in usual for refusal in refusals)


def test_two_gpus_that_are_alike_are_one_line_and_one_table(empty_cache, gpus):
    gpus(H100, H100)
    screen = output()
    lines = screen.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert len([line for line in lines if "H100" in line]) == 1
    assert "79.1 of 85.0 GB free each" in " ".join(screen.split())
    [(heading, rows)] = weights(screen).items()
    assert heading == "weights on cuda:0,1"
    assert rows["int4 g128 zp"] == ["swap_ab", "unmeasured", "grouped_int4"]
    assert "torch for a GPU" not in screen
    assert {state["device"] for state in told()["layouts"]} == {"cpu", "cuda:0", "cuda:1"}


def test_two_gpus_that_differ_have_a_table_each(empty_cache, gpus):
    gpus(H100, A100)
    tables = weights(output())
    assert tables["weights on cuda:0"]["int4 g128 zp"][0] == "swap_ab"
    assert tables["weights on cuda:1"]["int4 g128 zp"][0] == "int4_portable‡"


def test_where_hopper_kernels_refuse_the_screen_says_what_is_slow_and_what_to_install(empty_cache, gpus):
    gpus(A100)
    screen = output()
    rows = weights(screen)["weights on cuda:0"]
    assert rows["int4 g128 zp"] == ["int4_portable‡", "unmeasured", "grouped_int4‡"]
    assert rows["nvfp4"] == ["nvfp4_portable‡", "unmeasured", "grouped_nvfp4‡"]
    assert rows["iq2-xxs"] == ["iq2_portable‡", "unmeasured", "grouped_dequantize‡ slow"]
    assert "needs compute capability 9.0" in output("--verbose")
    if doctor_module.installed_version("gemlite") is None:
        assert "gemlite" in next(line for line in screen.splitlines() if line.startswith("to do more"))


@pytest.mark.parametrize(
    ("gpu", "int4", "nvfp4_kv"),
    [
        (H100, "run", "run"),
        (A100, "run through translation", "compiled only"),
        (RTX_4090, "run through translation", "run through translation"),
        (B200, "compiled only", "compiled only"),
        (RTX_5090, "compiled only", "compiled only"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_it_says_how_our_kernels_were_tried_on_such_a_gpu(empty_cache, gpus, gpu, int4: str, nvfp4_kv: str):
    gpus(gpu)
    screen, verbose = output(), output("--verbose")
    lines = screen.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    rows = weights(screen)["weights on cuda:0"]
    mark = MARKS.get(int4, "")
    for cell in (rows["int4 g128 zp"][0], rows["int4 g128 zp"][2]):
        assert cell.endswith(mark) and cell.rstrip("†‡") + mark == cell
    assert (f"{mark} {int4}" in screen) == (int4 != "run")
    assert re.search(rf"cuda:0 +int4_portable +yes \({int4}\): int4 g128", verbose)
    assert re.search(r"cuda:0 +tinygemm +yes: int4 g128", verbose)
    states = {state["layout"]: state for state in told()["layouts"] if state["device"] == "cuda:0"}
    assert (states["grouped_int4"]["tried"], states["tinygemm"]["tried"]) == (int4, None)
    kv_tried = told()["kv_tried"]["cuda:0"]
    assert kv_tried["kvarn_k4v2_g128"] == int4 and kv_tried["nvfp4"] == nvfp4_kv
    assert re.search(rf"(?m)^  cuda:0 +{int4}: .*kvarn_k4v2_g128", verbose.split("\nKV formats\n")[1])


def test_a_measured_table_with_the_longest_names_fits(empty_cache, gpus, monkeypatch):
    gpus(A100)
    monkeypatch.setattr(measurement_cache, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(f"{__name__}.CPU", torch.device("cuda", 0))
    keep({"gpu_dequantized": [1.0, 0.5]}, spec=FP8("row"))
    keep({"grouped_dequantize": [0.5, 0.4]}, spec=FP8("row"), experts=Experts(8, 2))
    screen = output()
    assert weights(screen)["weights on cuda:0"]["fp8 row"] == [
        "gpu_dequantized", "0.71 (0.50)", "grouped_dequantize‡ 0.45"
    ]  # fmt: skip
    assert max(map(len, screen.splitlines())) <= COLUMNS and "‡ run through translation" in screen


def test_what_no_layout_serves_is_said(empty_cache, gpus):
    gpus(("Tesla T4", (7, 5)))
    choices = [choice for choice in doctor().choices if choice.device == "cuda:0" and choice.experts]
    assert choices and all(choice.layout is None for choice in choices)
    assert {cells[-1] for cells in weights(output())["weights on cuda:0"].values()} == {"none"}
    assert told()["kv_tried"] == {}


def test_measured_speeds_are_shown_with_the_layout_that_they_choose(empty_cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    keep({"cpu_int4": [0.5, 0.6], "dequantize": [4.0, 1.0]})
    keep({"cpu_int4": [0.5, 0.6], "dequantize": [2.0, 2.0]}, n=1024)
    keep({"cpu_int4_per_expert": [3.0, 3.0]}, experts=Experts(8, 2))
    cells = weights(output())["weights on cpu"]["int4 g128 zp"]
    assert cells == ["dequantize", "2.00 (1.00)", "cpu_int4_per_expert 3.00"]
    dense = {choice.problem: choice for choice in doctor().choices if not choice.experts}
    choice = dense["int4 g128 zp"]
    assert (choice.layout, choice.shapes, choice.least_speed) == ("dequantize", 2, 1.0)
    assert choice.speed == pytest.approx(2.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(measurement_cache, "kernel_versions", lambda: {"torch": "another"}),
        lambda patch: patch.setattr(measurement_cache, "device_name", lambda device: "another CPU x1"),
        lambda patch: patch.setattr(measurement_cache, "_own_source", lambda: "another"),
        None,
    ],
    ids=["version", "device", "source", "none"],
)
def test_what_was_measured_elsewhere_or_before_an_update_is_not_shown(empty_cache, monkeypatch, change):
    with monkeypatch.context() as patch:
        if change is not None:
            change(patch)
        keep({"cpu_int4": [2.0, 2.0]})
    shown = {choice.problem: choice.speed for choice in doctor().choices if not choice.experts}
    assert shown["int4 g128 zp"] == (None if change else pytest.approx(2.0))


def test_only_speeds_against_bf16_and_of_the_same_parameters_count(empty_cache):
    keep({"cpu_int4_float32": [2.0]}, dtype=torch.float32)
    keep({"cpu_int4": [2.0]}, spec=Int4(group_size=64))
    assert all(choice.shapes == 0 for choice in doctor().choices)
    keep({"cpu_int4": [2.0]})
    assert sum(choice.shapes for choice in doctor().choices if choice.device == "cpu") == 1


def test_a_file_in_the_cache_that_cannot_be_read_is_as_good_as_absent(empty_cache):
    keep({"cpu_int4": [2.0]})
    [path] = measurement_cache.cache_directory().glob("*.json")
    (path.parent / "broken.json").write_text(path.read_text()[:-20])
    (path.parent / "other.json").write_text("[]")
    keep({"a_layout_of_a_plugin": [9.0]}, n=1024)
    assert [choice.speed for choice in doctor().choices if choice.shapes] == [pytest.approx(2.0)]


def test_every_layout_is_there_for_every_device_with_a_reason_where_refused():
    diagnosis = doctor()
    devices = 1 + torch.cuda.device_count()
    assert len(diagnosis.devices) == devices
    assert {state.layout for state in diagnosis.layouts} == set(LAYOUTS)
    assert all(state.refusal is None or state.refusal.strip() for state in diagnosis.layouts)
    always = [state for state in diagnosis.layouts if state.layout == "dequantize"]
    refused = [state.problem for state in always if state.refusal is not None]
    specs = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    emulated_on_a_cpu = [spec.key for spec in specs if dynamic_input(spec) is not None]
    assert sorted(refused) == sorted([*emulated_on_a_cpu, *["unquantized"] * devices])
    assert {state.problem for state in diagnosis.layouts} == {spec.key for spec in specs}


def test_no_request_is_sent(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("doctor opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert doctor().engines[0].available


@pytest.mark.parametrize("token", [None, "hf_something"])
def test_the_hub_login_is_told_without_telling_the_token(monkeypatch, token):
    monkeypatch.setattr(doctor_module, "get_token", lambda: token)
    screen, verbose = output(), output("--verbose")
    assert "hf_something" not in verbose
    assert ("no token" in screen) == ("a Hub token" in screen) == (token is None)
    assert ("hf auth login" in verbose) == (token is None)


def test_json_and_text_agree():
    value, text = told(), output("--verbose")
    # Not `torch.__version__`: of a build for CUDA from PyPI that alone has a local label, such as `+cu132`.
    assert value["versions"]["torch"] == version("torch") and version("torch") in text
    for state in value["layouts"]:
        assert state["refusal"] is None or state["refusal"] in text
    assert all(line in text for line in value["advice"])
    assert all(choice["layout"] in text for choice in value["choices"] if choice["layout"])


def test_what_is_missing_comes_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor_module.shutil, "which", lambda name: None)
    assert any("pip install vllm" in line for line in doctor().advice)
    assert "vllm" in doctor().missing


def test_it_works_in_a_tree_that_is_not_installed_and_without_triton(tmp_path: Path):
    tests = Path(__file__).resolve().parents[2]
    (tmp_path / "scalegate").symlink_to(tests.parent)
    paths = [str(tests / "without_triton"), str(tmp_path), *site_packages_without_scalegate(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, "-S", "-P", "-m", "scalegate.pipeline", "doctor"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Scalegate not installed, torch ") and "cpu_int4" in done.stdout


def site_packages_without_scalegate(tmp_path: Path) -> list[str]:
    """The installed packages, our own distribution left out."""
    linked = tmp_path / "packages"
    linked.mkdir()
    for folder in filter(lambda path: path.endswith("-packages"), sys.path):
        for path in Path(folder).iterdir():
            if "scalegate" not in path.name.lower() and not (linked / path.name).exists():
                (linked / path.name).symlink_to(path)
    return [str(linked)]
