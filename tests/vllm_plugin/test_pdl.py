"""Graphs of models whose linear layers or experts we serve are compiled with programmatic dependent launch.

What Inductor writes then is in `tests/kernels/test_inductor_pdl.py`.
"""

import importlib

import pytest
from scalegate.kernels import inductor_pdl
from scalegate.tests.vllm_plugin import stand_in

ASKED = "graph", ["x"], {"combo_kernels": True}, range(9), "key"


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.delenv("SCALEGATE_KERNELS", raising=False)
    monkeypatch.setattr(importlib.import_module("scalegate.vllm_plugin.cache_key"), "SERVED", set())
    found = stand_in.install(monkeypatch)
    importlib.import_module("scalegate.vllm_plugin.register").register()
    return found


@pytest.fixture
def served(vllm):
    importlib.import_module("scalegate.vllm_plugin.cache_key").SERVED.add("swap_ab int4 g128 sym 4096x4096")
    return vllm


@pytest.fixture
def open_while_compiling(monkeypatch):
    """How often kernels that wait first were asked for."""
    opened, waiting_first = [], inductor_pdl.waiting_first
    monkeypatch.setattr(inductor_pdl, "waiting_first", lambda: opened.append(1) or waiting_first())
    return opened


def test_a_model_that_is_served_is_compiled_with_pdl(served, open_while_compiling):
    pytest.importorskip("triton")
    graph, inputs, options, sizes, key = served.compiler().compile(*ASKED)
    assert options == {"combo_kernels": True, "triton.enable_pdl": True}
    assert (graph, inputs, sizes, key) == ("graph", ["x"], range(9), "key")
    served.compiler().compile("graph", ["x"], compiler_config={}, compile_range=range(9))
    assert open_while_compiling == [1, 1]
    [line] = served.log
    assert line == "scalegate-kernels has vLLM's graphs compiled with programmatic dependent launch"


def test_a_model_that_is_not_served_is_compiled_as_before(vllm, open_while_compiling):
    assert vllm.compiler().compile(*ASKED) == ASKED
    assert open_while_compiling == vllm.log == []


@pytest.mark.parametrize("experts", ["128 experts, top 8 int4 g128 sym 2048 768"])
def test_experts_are_compiled_with_pdl_alone_and_beside_linear_layers(served, open_while_compiling, experts):
    known = importlib.import_module("scalegate.vllm_plugin.cache_key").SERVED
    known.add(experts)
    assert served.compiler().compile(*ASKED) != ASKED
    known.intersection_update({experts})
    assert served.compiler().compile(*ASKED) != ASKED
    assert open_while_compiling == [1, 1]


def test_what_pdl_was_not_measured_with_is_compiled_as_before(served, open_while_compiling):
    attention = importlib.import_module("scalegate.vllm_plugin.attention")
    importlib.import_module("scalegate.vllm_plugin.cache_key").SERVED.add(attention.SERVED)
    assert served.compiler().compile(*ASKED) == ASKED
    assert open_while_compiling == []


def test_what_the_user_has_set_stays(served):
    options = served.compiler().compile("graph", [], {"triton.enable_pdl": False}, range(9))[2]
    assert options == {"triton.enable_pdl": False}
    [line] = served.log
    assert "without" in line
