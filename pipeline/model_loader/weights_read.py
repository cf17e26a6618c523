"""Linear layers whose weight the model's code reads for more than the product of `nn.Linear`.

A layer whose weight is read directly cannot be packed. Mamba's mixer computes `self.dt_proj.weight @
time_step` without calling the layer, and vLLM also leaves that weight unquantized. DeepSeek-V4's grouped
layers multiply each group of inputs by other rows.
"""

import ast
import inspect
import textwrap
from functools import cache

import torch
from torch import nn

ABOUT_THE_WEIGHT = ("dtype", "device", "shape")
"""Attributes of a weight that do not depend on its numbers."""
ONLY_IN_TRAINING = "training"
"""Part of the conditions of code that a server never runs: `self.training`, BLOOM's `self.pretraining_tp`."""
SETTING_UP = ("__init__", "_init_weights", "reset_parameters")


def reads_weight(parent: nn.Module, child: str) -> bool:
    """Say whether `parent` reads the numbers of `self.<child>.weight` when it is served."""
    kind: object = type(parent)  # mypy takes no class for hashable
    return child in _weights_read(kind)


def multiplies(linear: nn.Linear) -> bool:
    """Say whether the layer computes what `nn.Linear` computes, judged by the shape of its output."""
    if type(linear).forward is nn.Linear.forward:
        return True
    inputs = linear.weight.new_empty(1, linear.in_features, device="meta")
    weights = {name: parameter.to("meta") for name, parameter in linear.named_parameters()}
    try:
        output = torch.func.functional_call(linear, weights, (inputs,))
    except RuntimeError:
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, linear.out_features)


@cache
def _weights_read(module: object) -> frozenset[str]:
    found: set[str] = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name in SETTING_UP or function.__module__.startswith("torch."):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except OSError:  # made by a decorator or at run time
            continue
        if ".weight" in source:
            _collect(ast.parse(source), found)
    return frozenset(found)


def _collect(node: ast.AST, found: set[str]) -> None:
    match node:
        case ast.If(test=test, orelse=otherwise) if ONLY_IN_TRAINING in ast.unparse(test):
            for statement in otherwise:
                _collect(statement, found)
            return
        case ast.Attribute(attr=attribute) if attribute in ABOUT_THE_WEIGHT:
            return
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="self"), attr=layer), attr="weight", ctx=ast.Load()
        ):
            found.add(layer)
    for child in ast.iter_child_nodes(node):
        _collect(child, found)
