"""Packs a model's unquantized linear layers: in batch-invariant layouts, or in the fastest ones.

Quantized weights are packed while they are loaded instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ...base.batch_invariance import BatchInvariance
from ...base.log import logger
from ..formats.unquantized import Unquantized, UnquantizedWeight
from ..modules.linear import QuantizedLinear
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import Layout, Problem
from .choose import default_layout, pick
from .measure import MAX_ERROR, ShapeMeasurements
from .plan import Measurement
from .timing import TimingBudget, interleaved_microseconds

TIMED_MS = (1, 8, 32)
TIMED_BYTES = 4 << 20
"""Bytes of weights timed in turn for one shape: so many that they are not all in a core's cache."""
BUDGET = TimingBudget(samples=8, seconds=0.1)
"""For one shape and one M. Layouts differ by a third and more, so few samples suffice to tell them apart."""


@torch.no_grad()
def pack_linears(model: nn.Module, batch_invariance: BatchInvariance) -> int:
    """Replace every plain `nn.Linear` without copying its weight; return how many products were replaced.

    Merged layers still share one product.
    """
    linears = _plain_linears(model)
    for linear, places in linears.items():
        problem = replace(_problem(linear), batch_invariance=batch_invariance)
        _put(_packed(linear, default_layout(problem)), places)
    return len(linears)


@torch.no_grad()
def pack_fastest(model: nn.Module) -> dict[str, str]:
    """Replace plain `nn.Linear`s for which another layout is faster than torch's; return layouts by shape.

    All layers of one shape get one layout. The layout is chosen like any other, by timing some of the layers.
    The weight of a tied embedding stays, beside the packed one.
    """
    by_shape: dict[Problem, list[nn.Linear]] = {}
    places = _plain_linears(model)
    for linear in places:
        by_shape.setdefault(_problem(linear), []).append(linear)
    chosen = {}
    for problem, linears in by_shape.items():
        layout = _fastest(problem, linears)
        if layout is not None:
            chosen[str(problem)] = layout
            while linears:  # each is let go at once, so that one weight only is in memory twice
                linear = linears.pop()
                _put(_packed(linear, layout), places.pop(linear))
    return chosen


Places = list[tuple[nn.Module, str]]
"""Modules, and the name in each of the linear layer that is to be replaced."""


def _plain_linears(model: nn.Module) -> dict[nn.Linear, Places]:
    found: dict[nn.Linear, Places] = {}
    for parent in list(model.modules()):
        # `named_children` would leave out the second place of one child.
        for name, child in parent._modules.items():
            if type(child) is nn.Linear:
                found.setdefault(child, []).append((parent, name))
    return found


def _put(module: nn.Module, places: Places) -> None:
    for parent, name in places:
        parent.add_module(name, module)


def _problem(linear: nn.Linear) -> Problem:
    return Problem.of(_weight(linear), linear.weight.dtype, linear.weight.device)


def _weight(linear: nn.Linear) -> UnquantizedWeight:
    return UnquantizedWeight(Unquantized(), linear.weight.data)


def _packed(linear: nn.Linear, layout: str) -> QuantizedLinear:
    bias = None if linear.bias is None else linear.bias.data
    return QuantizedLinear(cast(Layout, LAYOUTS[layout]).pack(_weight(linear), linear.weight.dtype), bias)


def _fastest(problem: Problem, linears: Sequence[nn.Linear]) -> str | None:
    """Return the fastest layout for the given layers; None if none is faster than torch's own product."""
    torchs, *others = [name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None]
    if not others:
        return None
    bytes_each = problem.n * problem.k * problem.dtype.itemsize
    timed = linears[: max(1, -(-TIMED_BYTES // bytes_each))]
    x = torch.randn(max(TIMED_MS), 1, problem.k).to(problem.dtype)
    contestants: dict[str, Sequence[nn.Module]] = {torchs: timed}
    for name in others:
        packed = _ready(name, timed, x)
        if packed is not None:
            contestants[name] = packed
    found = ShapeMeasurements()
    for m in TIMED_MS:
        calls = {name: partial(_call, modules, x[:m]) for name, modules in contestants.items()}
        with torch.inference_mode():
            times = interleaved_microseconds(calls, len(timed), problem.device, BUDGET)
        found.measurements += [
            Measurement(name, LAYOUTS[name].kernel, m, taken, times[torchs]) for name, taken in times.items()
        ]
    layout = pick(str(problem), (), found).layout
    return None if layout == torchs else layout


def _call(modules: Sequence[nn.Module], x: Tensor, copy: int) -> object:
    return modules[copy](x)


def _ready(layout: str, linears: Sequence[nn.Linear], x: Tensor) -> list[QuantizedLinear] | None:
    """Return the layers packed in `layout`; None if the layout fails or multiplies wrongly on this device."""
    try:
        packed = [_packed(linear, layout) for linear in linears]
        y, expected = packed[0](x).float(), linears[0](x).float()
    except Exception as error:
        logger.debug(f"{layout} is not used: {type(error).__name__}: {error}")
        return None
    return packed if (y - expected).norm() <= MAX_ERROR * expected.norm() else None
