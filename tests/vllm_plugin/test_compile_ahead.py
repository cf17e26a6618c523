"""What other processes compile ahead is what the process that serves then launches."""

import os
import subprocess
import sys

import pytest
from scalegate.tests.exhaustive import exhaustive_but

pytest.importorskip("triton")

import torch
import triton
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.tests.kernels.architectures.pretended_gpu import pretended_gpu
from scalegate.vllm_plugin import compile_ahead, experts_product, warm_up
from scalegate.vllm_plugin.choice import EXPERTS, LAYOUTS

pytestmark = pytest.mark.long

N, K, MOST = 4096, 4096, 16
CPU = torch.device("cpu")
PROBLEM = Problem(Int4(128, True), N, K, torch.bfloat16, CPU)


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """The lines for vLLM's log."""
    lines = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    # The compiler has a low priority: beside tests on all cores it takes minutes.
    monkeypatch.setattr(compile_ahead, "MOST_SECONDS", 280)
    monkeypatch.setattr(compile_ahead, "AHEAD", compile_ahead.Ahead())
    monkeypatch.setattr(compile_ahead.logger, "info", lambda line, *words: lines.append(line % words))
    return lines


def found_compiled(record) -> list[bool]:
    """Of each kernel that was launched, whether Triton finds it."""
    found = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        for launch in record.launches.values():
            launch.compile(90)
    return found


@pytest.mark.parametrize(
    ("layout", "spec"),
    exhaustive_but(
        [("swap_ab", Int4(128, True)), ("nvfp4_swap_ab_invariant", NVFP4())],
        ("swap_ab", Int4(128, True)),
    ),
)
def test_a_server_finds_compiled_what_its_layers_launch(layout, spec, log):
    problem = Problem(spec, N, K, torch.bfloat16, CPU)
    compile_ahead.compile_ahead(layout, problem, MOST)
    compile_ahead.wait_for_compiler()
    with pretended_gpu(90) as record:
        packed = LAYOUTS[layout].pack(spec.random(N, K, CPU), torch.bfloat16)
        warm_up.warm_up(LAYOUTS[layout], packed, MOST)
    found = found_compiled(record)
    assert found and all(found) and not log


@pytest.mark.parametrize(
    "spec", exhaustive_but([Int4(128, True), NVFP4()], NVFP4()), ids=lambda spec: spec.name
)
def test_a_server_finds_compiled_what_its_experts_launch(spec, log):
    experts, top_k, hidden, inner, most = 4, 2, 256, 128, 12
    problem = Problem(spec, 2 * inner, hidden, torch.bfloat16, CPU, Experts(experts, top_k))
    compile_ahead.compile_experts_ahead(problem, most)
    compile_ahead.wait_for_compiler()
    with pretended_gpu(90) as record:
        gate_up, down = (
            EXPERTS[type(spec)].pack_experts([spec.random(n, k, CPU)] * experts, torch.bfloat16)
            for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        products = experts_product.products_of(spec, gate_up, down)
        experts_product.warm_up(products, top_k, torch.bfloat16, most)
    names = {launch.name for launch in record.launches.values()}
    assert {"_route", "packed_grouped_kernel", "weighted_sum_kernel"} <= names
    assert all(found_compiled(record)) and not log


def test_what_is_compiled_is_found_where_torch_compile_has_moved_tritons_cache(tmp_path, monkeypatch):
    """torch.compile sets the variable if nobody has: vLLM compiles its graphs before the first product."""
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "AHEAD", compile_ahead.Ahead())
    compile_ahead.compile_ahead("swap_ab", PROBLEM, MOST)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor"))
    with pretended_gpu(90) as record:
        packed = LAYOUTS["swap_ab"].pack(PROBLEM.spec.random(N, K, CPU), torch.bfloat16)
        warm_up.warm_up(LAYOUTS["swap_ab"], packed, MOST)
    found = []
    monkeypatch.setattr(warm_up, "PENDING", [lambda: found.extend(found_compiled(record))])
    warm_up.warm_up_pending()
    assert found and all(found)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "inductor")
    assert not any(found_compiled(record)), "a test that could not fail"


@pytest.mark.parametrize("program", ["false", "no such program"])
def test_a_compiler_that_does_not_run_is_not_waited_for(program, monkeypatch, log):
    """Then the process that serves compiles by itself, and says so once."""
    monkeypatch.setattr(sys, "executable", program)
    for _ in range(3):
        compile_ahead.compile_ahead("swap_ab", PROBLEM, MOST)
    compile_ahead.wait_for_compiler()
    with compile_ahead.settings_of_compiler():
        pass
    [line] = log
    assert "at the first product, not ahead" in line


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_compiler_that_fails_says_why(has_ended, log):
    compile_ahead.compile_ahead("no such layout", PROBLEM, MOST)
    if has_ended:
        compile_ahead.AHEAD.compiler.process.wait()
        compile_ahead.compile_ahead("swap_ab", PROBLEM, MOST)
    compile_ahead.wait_for_compiler()
    [line] = log
    assert "KeyError: 'no such layout'" in line


def test_nothing_is_started_where_no_layer_was_chosen(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    compile_ahead.wait_for_compiler()
