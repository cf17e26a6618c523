"""As much of vLLM 0.26 as the plugin touches, under its names, for tests on machines without vLLM.

What the plugin finds in the real one is tested on a GPU by `tests/bench/vllm_plugin/`.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from scalegate.tests.vllm_plugin import stand_in_attention
from torch import nn

PLUGIN = "scalegate.vllm_plugin"
IMPORTING_VLLM = (
    "interface", "int_linear", "nvfp4_linear", "serving", "experts", "attention_interface", "attention",
    "pdl",
)  # fmt: skip
"""Modules of the plugin that hold what they have imported from vLLM: they are imported anew."""


class ScalarType(str):
    """Named like vLLM's."""


TYPES = {name: ScalarType(name) for name in ("uint4", "uint4b8", "uint8b128", "uint8")}


@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool
    out_type: torch.dtype | None = None


class MPLinearKernel:
    def __init__(self, c, w_q_param_name, w_s_param_name, w_zp_param_name=None, w_gidx_param_name=None):
        assert self.can_implement(c)
        self.config = c
        self.w_q_name, self.w_s_name = w_q_param_name, w_s_param_name
        self.w_zp_name, self.w_gidx_name = w_zp_param_name, w_gidx_param_name

    def _get_weight_params(self, layer):
        names = (self.w_q_name, self.w_s_name, self.w_zp_name or "", self.w_gidx_name or "")
        return tuple(getattr(layer, name, None) for name in names)


class MacheteLinearKernel(MPLinearKernel):
    pass


class MarlinNvFp4LinearKernel:
    def process_weights_after_loading(self, layer):
        layer.packed_by = "marlin"

    def apply_weights(self, layer, x, bias=None):
        return "marlin's product"


class MarlinExperts:
    """Of experts that Marlin packed."""

    def __init__(self, moe_config: Any, quant_config: Any):
        self.moe_config, self.quant_config = moe_config, quant_config

    block_shape = property(lambda self: self.quant_config.block_shape)
    w1_scale = property(lambda self: self.quant_config.w1_scale)
    w2_scale = property(lambda self: self.quant_config.w2_scale)
    g1_alphas = property(lambda self: self.quant_config.g1_alphas)
    g2_alphas = property(lambda self: self.quant_config.g2_alphas)

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        return "marlin's size"

    def apply(self, output, *rest, **named):
        output.fill_(1)


def process_weights_marlin(
    layer, input_dtype, num_bits, pack_factor, group_size, actorder, w13_qweight, w2_qweight, w13_scales,
    w2_scales, w13_g_idx, w2_g_idx, w13_qzeros=None, w2_qzeros=None, w13_bias=None, w2_bias=None,
):  # fmt: skip
    return ("marlin", layer, num_bits, w13_qweight, w2_scales, w2_g_idx, w13_qzeros, w2_bias)


def prepare_nvfp4_moe_layer_for_marlin(
    layer, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, is_act_and_mul
):
    return ("marlin", layer, w13, w2_scale_2, is_act_and_mul)


class InductorStandaloneAdaptor:
    """Says what it was asked to compile, and how."""

    def compile(self, graph, example_inputs, compiler_config, compile_range, key=None):
        return graph, example_inputs, compiler_config, compile_range, key


class Parameter(nn.Parameter):
    """A parameter that knows which of its dimensions are which."""

    def __new__(cls, data: torch.Tensor, **dims: int):
        made = super().__new__(cls, data, requires_grad=False)
        made.dims = dims
        return made


def permute_param_layout_(param: Parameter, input_dim: int, output_dim: int, packed_dim: int | None = None):
    if param.dims["input_dim"] != input_dim:
        param.data = param.data.t()
        if "packed_dim" in param.dims:
            param.dims["packed_dim"] = 1 - param.dims["packed_dim"]
    if packed_dim is not None:
        assert param.dims["packed_dim"] == packed_dim
    param.dims |= {"input_dim": input_dim, "output_dim": output_dim}
    return param


@dataclass
class StandIn:
    """What tests look at and change."""

    envs: Any
    linear: Any
    platform: Any
    config: Any
    log: list[str]

    int_wna16: Any
    nvfp4: Any
    compiler: type[InductorStandaloneAdaptor]
    backends: Any

    @property
    def mixed(self) -> list[type]:
        return self.linear._POSSIBLE_KERNELS["cuda"]

    @property
    def fp4(self) -> list[type]:
        return self.linear._POSSIBLE_NVFP4_KERNELS["cuda"]


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.26.0") -> StandIn:
    """Put the stand-in where `import vllm` finds it, until the test ends."""
    log: list[str] = []
    logger = SimpleNamespace(
        info=lambda line, *words: log.append(line % words if words else line), hasHandlers=lambda: True
    )
    envs = SimpleNamespace(environment_variables={}, VLLM_BATCH_INVARIANT=False, VLLM_DISABLED_KERNELS=[])
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: (9, 0))
    config = SimpleNamespace(
        kernel_config=SimpleNamespace(linear_backend="auto"),
        parallel_config=SimpleNamespace(use_ubatching=False, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=4),
        **stand_in_attention.config(),
    )
    registry = stand_in_attention.registry()
    backends = registry["AttentionBackendEnum"]
    linear = ModuleType("vllm.model_executor.kernels.linear")
    linear.__dict__.update(
        MarlinNvFp4LinearKernel=MarlinNvFp4LinearKernel, MPLinearKernel=MPLinearKernel,
        MPLinearLayerConfig=MPLinearLayerConfig, _POSSIBLE_KERNELS={"cuda": [MacheteLinearKernel]},
        _POSSIBLE_NVFP4_KERNELS={"cuda": [object, MarlinNvFp4LinearKernel]},
    )  # fmt: skip
    int_wna16 = SimpleNamespace(MarlinExperts=MarlinExperts, _process_weights_marlin=process_weights_marlin)
    nvfp4 = SimpleNamespace(
        backend_to_kernel_cls=lambda backend: [object, MarlinExperts],
        prepare_nvfp4_moe_layer_for_marlin=prepare_nvfp4_moe_layer_for_marlin,
    )
    compiler = type("InductorStandaloneAdaptor", (InductorStandaloneAdaptor,), {})
    fused_moe = "vllm.model_executor.layers.fused_moe"
    modules = {
        "vllm.model_executor.layers": {},
        fused_moe: {},
        f"{fused_moe}.activation": {"MoEActivation": SimpleNamespace(SILU="silu", GELU="gelu")},
        f"{fused_moe}.experts": {},
        f"{fused_moe}.experts.marlin_moe": {"MarlinExperts": MarlinExperts},
        f"{fused_moe}.oracle": {"int_wna16": int_wna16, "nvfp4": nvfp4},
        "vllm": {"__version__": version, "envs": envs},
        "vllm.compilation": {},
        "vllm.compilation.compiler_interface": {"InductorStandaloneAdaptor": compiler},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.model_executor": {},
        "vllm.model_executor.kernels": {"linear": linear},
        "vllm.model_executor.parameter": {"permute_param_layout_": permute_param_layout_},
        "vllm.platforms": {
            "PlatformEnum": SimpleNamespace(CUDA="cuda"),
            "current_platform": platform,
        },
        "vllm.scalar_type": {"scalar_types": SimpleNamespace(**TYPES)},
        **stand_in_attention.modules(registry),
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, linear.__name__, linear)
    for name in IMPORTING_VLLM:
        monkeypatch.delitem(sys.modules, f"{PLUGIN}.{name}", raising=False)
        monkeypatch.delattr(importlib.import_module(PLUGIN), name, raising=False)
    monkeypatch.setattr(importlib.import_module(f"{PLUGIN}.register"), "logger", logger)
    return StandIn(envs, linear, platform, config, log, int_wna16, nvfp4, compiler, backends)
