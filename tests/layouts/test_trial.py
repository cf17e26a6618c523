"""A layout whose kernel does not compile here refuses with the compiler's words."""

import pytest
import torch
from scalegate.layouts.choosing.choose import default_layout
from scalegate.layouts.formats.int4 import Int4
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


@pytest.mark.gpu
def test_what_was_found_is_asked_for_once(monkeypatch):
    monkeypatch.setattr(trial, "REASONS", {})
    tried = []
    monkeypatch.setattr(trial, "failure", lambda layout, asked: tried.append(asked) or "does not run")
    on_gpu = Problem(Int4(128), 4096, 4096, torch.bfloat16, torch.device("cuda"))
    assert [LAYOUTS["swap_ab"].refuses(on_gpu) for _ in range(3)] == ["does not run"] * 3
    assert len(tried) == 1
