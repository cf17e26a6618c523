"""A layout whose kernel does not compile here refuses with the compiler's words."""

from itertools import product

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.choosing.choose import default_layout
from scalegate.layouts.choosing.tried import OwnKernel
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing import trial
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, PackedWeight, Problem

CPU = torch.device("cpu")
COMPILER_SAYS = "at 41:13:\n\nresult shared-memory footprint exceeds the source view\n"


class Broken:
    """Packs as others do; its kernel does not compile."""

    name = "broken"
    kernel = "broken_kernel"

    def refuses(self, problem: Problem) -> str | None:
        return trial.failure(self, trial.small(problem)) or None

    def pack(self, weight, dtype) -> PackedWeight:
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, weight.tensors())

    def matmul(self, x, packed):
        raise RuntimeError(COMPILER_SAYS)


def problem(group_size: int = 128, **others) -> Problem:
    return Problem(Int4(group_size), 4096, 4096, torch.bfloat16, CPU, **others)


def test_a_kernel_that_does_not_compile_is_refused_in_one_line():
    reason = Broken().refuses(problem())
    assert reason is not None and "\n" not in reason
    assert reason.startswith("does not run with Triton ") and reason.endswith("exceeds the source view")


@pytest.mark.parametrize("experts", [None, Experts(64, 8)], ids=["dense", "experts"])
def test_a_layout_that_multiplies_is_not_refused(experts):
    asked = problem(experts=experts)
    layout = LAYOUTS[default_layout(asked)]
    assert trial.failure(layout, trial.small(asked)) == ""


def test_the_shape_that_is_tried_is_small_where_the_format_takes_that():
    assert (trial.small(problem()).n, trial.small(problem()).k) == (trial.SMALL_N, trial.SMALL_K)
    assert trial.small(problem(group_size=1024)).k == 4096
    assert trial.small(problem(experts=Experts(64, 8))).experts == Experts(2, 1)


def on_a_gpu(layout: OwnKernel) -> Problem:
    """A problem that a layout of ours does not refuse on a GPU where every kernel runs."""
    modes, experts = ("tuned", "pin"), (None, Experts(64, 8))
    specs = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    for spec, mode, some in product([*specs, NVFP4(activations=True)], modes, experts):
        asked = Problem(spec, 256, 512, torch.bfloat16, torch.device("cuda", 0), some, mode)
        if layout.refuses(asked) is None:
            return asked
    raise AssertionError(f"{layout} refuses everything")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 on which every kernel runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(trial, "REASONS", {})
    monkeypatch.setattr(trial, "failure", lambda layout, asked: "")


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if isinstance(layout, OwnKernel)])
def test_every_kernel_of_ours_is_tried_before_its_layout_serves(hopper, monkeypatch, name: str):
    if name == "nvfp4_scaled":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    asked = on_a_gpu(LAYOUTS[name])
    monkeypatch.setattr(trial, "REASONS", {})
    monkeypatch.setattr(trial, "failure", lambda layout, asked: "does not run with Triton 9.9: no such thing")
    assert LAYOUTS[name].refuses(asked) == "does not run with Triton 9.9: no such thing"


def test_if_nothing_serves_the_error_says_what_the_compiler_said(hopper, monkeypatch):
    asked = on_a_gpu(LAYOUTS["grouped_unquantized"])
    monkeypatch.setattr(trial, "REASONS", {})
    monkeypatch.setattr(trial, "failure", lambda layout, asked: "does not run with Triton 9.9: no such thing")
    with pytest.raises(UserError, match=r"grouped_unquantized does not run with Triton 9\.9: no such thing"):
        default_layout(asked)


@pytest.mark.gpu
def test_what_was_found_is_asked_for_once(monkeypatch):
    monkeypatch.setattr(trial, "REASONS", {})
    tried = []
    monkeypatch.setattr(trial, "failure", lambda layout, asked: tried.append(asked) or "does not run")
    on_gpu = Problem(Int4(128), 4096, 4096, torch.bfloat16, torch.device("cuda"))
    assert [LAYOUTS["int4_portable"].refuses(on_gpu) for _ in range(3)] == ["does not run"] * 3
    assert len(tried) == 1
