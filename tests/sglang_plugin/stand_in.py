"""As much of SGLang 0.5.16 as the plugin touches, under its names, for tests on machines without SGLang."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

PLUGIN = "scalegate.sglang_plugin"
TYPES = {bits: SimpleNamespace(size_bits=bits) for bits in (4, 8)}


@dataclass
class MarlinLinearLayerConfig:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: Any
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool


class CompressedTensorsWNA16:
    def __init__(self, kernel_config: MarlinLinearLayerConfig):
        self.kernel_config = kernel_config

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.packed_by = "marlin"

    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return "marlin's product"


@dataclass
class StandIn:
    """What tests look at and change."""

    hooks: dict[str, Callable[..., Any]]
    server: Any
    log: list[str]
    scheme: type[CompressedTensorsWNA16]

    def apply_hooks(self) -> None:
        """Put the hooks around the scheme's methods, as SGLang does after it has called all plugins."""
        for target, hook in self.hooks.items():
            method = target.rpartition(".")[2]
            setattr(self.scheme, method, around(getattr(self.scheme, method), hook))


def around(theirs: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **named: hook(theirs, *values, **named)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.16") -> StandIn:
    """Put the stand-in where `import sglang` finds it, until the test ends."""
    hooks: dict[str, Callable[..., Any]] = {}
    log: list[str] = []
    server = SimpleNamespace(enable_deterministic_inference=False, enable_two_batch_overlap=False)
    around_it = object()

    def register(target: str, hook: Callable[..., Any], kind: object) -> None:
        assert kind is around_it
        hooks[target] = hook

    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {"get_server_args": lambda: server},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=register),
            "HookType": SimpleNamespace(AROUND=around_it),
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"{PLUGIN}.int_linear", raising=False)
    monkeypatch.delattr(importlib.import_module(PLUGIN), "int_linear", raising=False)
    register_module = importlib.import_module(f"{PLUGIN}.register")
    logger = SimpleNamespace(info=lambda line, *words: log.append(line % words if words else line))
    monkeypatch.setattr(register_module, "logger", logger)
    scheme = type("CompressedTensorsWNA16", (CompressedTensorsWNA16,), {})
    return StandIn(hooks, server, log, scheme)
