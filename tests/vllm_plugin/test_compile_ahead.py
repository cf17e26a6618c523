"""What other processes compile ahead is what the process that serves then launches."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

import torch
import triton
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.layout import Problem
from scalegate.tests.kernels.architectures.pretended_gpu import pretended_gpu
from scalegate.vllm_plugin import compile_ahead, warm_up
from scalegate.vllm_plugin.choice import LAYOUTS

pytestmark = pytest.mark.long

N, K, MOST = 4096, 4096, 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "COMPILERS", [])


@pytest.mark.parametrize(
    ("layout", "spec"), [("swap_ab", Int4(128, True)), ("nvfp4_swap_ab_invariant", NVFP4())]
)
def test_a_server_finds_compiled_what_its_layers_launch(layout, spec):
    problem = Problem(spec, N, K, torch.bfloat16, CPU)
    compile_ahead.compile_ahead(layout, problem, MOST)
    compile_ahead.wait_for_compilers()
    assert not compile_ahead.COMPILERS
    with pretended_gpu(90) as record:
        packed = LAYOUTS[layout].pack(spec.random(N, K, CPU), torch.bfloat16)
        warm_up.warm_up(LAYOUTS[layout], packed, MOST)
    found = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        for launch in record.launches.values():
            launch.compile(90)
    assert found and all(found)


@pytest.mark.parametrize("program", ["false", "no such program"])
def test_a_compiler_that_does_not_run_is_not_waited_for(program, monkeypatch):
    """Then the process that serves compiles by itself."""
    monkeypatch.setattr(sys, "executable", program)
    problem = Problem(Int4(128, True), N, K, torch.bfloat16, CPU)
    for _ in range(3):
        compile_ahead.compile_ahead("swap_ab", problem, MOST)
    compile_ahead.wait_for_compilers()
    assert not compile_ahead.COMPILERS


def test_nothing_is_started_where_no_layer_was_chosen(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    compile_ahead.wait_for_compilers()
