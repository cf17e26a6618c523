"""The plugin offers its kernels before vLLM's own; where it does not know its way it says so in one line."""

import importlib

import pytest
from scalegate.tests.vllm_plugin import stand_in


def register() -> None:
    importlib.import_module("scalegate.vllm_plugin.register").register()


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.delenv("SCALEGATE_KERNELS", raising=False)
    return stand_in.install(monkeypatch)


def test_it_is_first_and_leaves_all_others_in_their_order(vllm):
    register()
    ours, machete = vllm.mixed
    assert (ours.__name__, machete) == ("ScalegateLinearKernel", stand_in.MacheteLinearKernel)
    before, fp4, marlin = vllm.fp4
    assert (before, marlin) == (object, stand_in.MarlinNvFp4LinearKernel)
    assert fp4.__name__ == "ScalegateNvFp4LinearKernel"
    assert vllm.linear.MarlinNvFp4LinearKernel is fp4, "weight-only layers take it by name"
    assert vllm.log == []


def test_the_compile_cache_depends_on_the_version_of_the_kernels(vllm, monkeypatch):
    register()
    value = vllm.envs.environment_variables["SCALEGATE_KERNELS"]
    cache_key = importlib.import_module("scalegate.vllm_plugin.cache_key")
    monkeypatch.setattr(cache_key, "SERVED", set())
    before = value()
    assert before == cache_key.digest() == cache_key.digest.__wrapped__()
    cache_key.SERVED.add("swap_ab int4 g128 sym 4096x4096")
    assert value() != before, "what is served counts"
    monkeypatch.setattr(cache_key, "ROOMS", ("base", "kernels", "layouts"))
    assert cache_key.digest.__wrapped__() != before, "every file counts"


def test_experts_are_chosen_where_marlins_would_be(vllm):
    register()
    [before, experts] = vllm.nvfp4.backend_to_kernel_cls("MARLIN")
    assert (before, experts.__name__) == (object, "ScalegateExperts")
    assert vllm.int_wna16.MarlinExperts is experts
    assert issubclass(experts, stand_in.MarlinExperts)


def test_experts_of_an_interface_that_is_not_known_stay_vllms(vllm):
    marlin = vllm.nvfp4.prepare_nvfp4_moe_layer_for_marlin = lambda layer, w13: None
    register()
    assert vllm.int_wna16.MarlinExperts is stand_in.MarlinExperts
    assert vllm.nvfp4.prepare_nvfp4_moe_layer_for_marlin is marlin
    assert vllm.mixed[0].__name__ == "ScalegateLinearKernel", "linear layers are served"
    [line] = vllm.log
    assert line.startswith("scalegate-kernels leaves all experts to vLLM: ")


def test_attention_of_an_interface_that_is_not_known_stays_vllms(vllm, monkeypatch):
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    monkeypatch.delattr(registry, "register_backend")
    register()
    assert not vllm.backends.CUSTOM.is_overridden()
    assert vllm.mixed[0].__name__ == "ScalegateLinearKernel", "linear layers are served"
    [line] = vllm.log
    assert line.startswith("scalegate-kernels leaves all attention to vLLM: ")


def test_the_attention_backend_of_another_plugin_stays(vllm):
    importlib.import_module("vllm.v1.attention.backends.registry").register_backend(
        vllm.backends.CUSTOM, "theirs"
    )
    register()
    assert vllm.backends.CUSTOM.get_path() == "theirs"
    [line] = vllm.log
    assert "another plugin has registered an attention backend" in line


def test_a_compiler_of_an_interface_that_is_not_known_stays_as_it_is(vllm):
    theirs = vllm.compiler.compile = lambda self, graph: None
    register()
    assert vllm.compiler.compile is theirs
    assert vllm.mixed[0].__name__ == "ScalegateLinearKernel", "layers are served"
    [line] = vllm.log
    assert line.startswith("scalegate-kernels leaves vLLM's own graphs as they are: ")


def steps_aside(vllm, *told: str) -> None:
    register()
    assert vllm.int_wna16.MarlinExperts is stand_in.MarlinExperts
    assert vllm.mixed == [stand_in.MacheteLinearKernel]
    assert not vllm.backends.CUSTOM.is_overridden()
    assert vllm.linear.MarlinNvFp4LinearKernel is stand_in.MarlinNvFp4LinearKernel
    assert vllm.envs.environment_variables == {}, "the cache of a vLLM without us is used as it is"
    [line] = vllm.log
    assert line.startswith("scalegate-kernels does not serve: ")
    assert [word for word in told if word not in line] == []


def test_a_variable_turns_it_off(vllm, monkeypatch):
    monkeypatch.setenv("SCALEGATE_KERNELS", "0")
    steps_aside(vllm, "SCALEGATE_KERNELS=0")


@pytest.mark.parametrize("version", ["0.25.3", "0.27.0", "1.0.0", "dev"])
def test_a_version_that_was_not_tested_is_left_alone(monkeypatch, version):
    steps_aside(stand_in.install(monkeypatch, version), "knows vLLM from 0.26 on, before 0.27")


def test_a_vllm_whose_logging_is_not_configured_yet_is_told_on_stderr(vllm, monkeypatch, capsys):
    """vLLM 0.32 loads plugins first: a line of its logger would be lost."""
    monkeypatch.setenv("SCALEGATE_KERNELS", "0")
    logger = importlib.import_module("scalegate.vllm_plugin.register").logger
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    register()
    assert vllm.log == []
    assert capsys.readouterr().err == "scalegate-kernels does not serve: SCALEGATE_KERNELS=0\n"


def test_a_cpu_is_left_alone(vllm):
    vllm.platform.is_cuda = lambda: False
    steps_aside(vllm, "CUDA")


def test_another_gpu_is_left_alone(vllm):
    vllm.platform.get_device_capability = lambda: (10, 0)
    steps_aside(vllm, "Hopper")


def test_a_vllm_that_lacks_something_is_left_alone(vllm):
    del vllm.linear._POSSIBLE_NVFP4_KERNELS
    steps_aside(vllm, "AttributeError", "_POSSIBLE_NVFP4_KERNELS")


def test_a_vllm_without_that_marlin_kernel_is_left_alone(vllm):
    vllm.fp4.remove(stand_in.MarlinNvFp4LinearKernel)
    steps_aside(vllm, "ValueError")
