"""How we tried our own kernels on a kind of GPU: run, run through translation, or compiled only.

`packing/trial.py` tries whether a kernel runs on this machine, and `measure.py` how fast it is.
"""

from collections.abc import Iterable
from typing import Literal, Protocol, runtime_checkable

import torch

from ..packing.all_layouts import LAYOUTS
from ..packing.layout import AnyLayout
from .plan import LayoutPlan

Tried = Literal["run", "run through translation", "compiled only"]
MARKS: dict[Tried | None, str] = {"compiled only": "†", "run through translation": "‡"}
"""Behind a layout's name in tables, if we never ran its kernel on such a GPU."""
KV_RUN_ON = ((9, 0),)
"""Compute capabilities of GPUs that ran the tests of the kernels of KV formats."""
KV_TRANSLATED_FOR: dict[str, tuple[tuple[int, int], ...]] = {
    "unquantized": ((8, 0), (8, 9)),
    "kvarn": ((8, 0), (8, 9)),
    "int4": ((8, 0), (8, 9)),
    "fp8": ((8, 9),),
    "nvfp4": ((8, 9),),
}
"""By the first word of a KV format's name, compute capabilities whose code ran on a newer GPU."""
KV_COMPILED_FROM = (8, 0)


@runtime_checkable
class OwnKernel(Protocol):
    """A layout whose kernel is ours. A test compiles all layouts that are offered on compute capability 8.0,
    8.6, 8.9, 9.0, 10.0, 12.0 and 12.1."""

    @property
    def run_on(self) -> tuple[tuple[int, int], ...]:
        """Compute capabilities of the GPUs that ran its tests."""
        ...

    @property
    def translated_for(self) -> tuple[tuple[int, int], ...]:
        """Compute capabilities whose code ran its tests on a newer GPU, which translated it."""
        ...


def tried(layout: AnyLayout, capability: tuple[int, int]) -> Tried | None:
    """Return how the layout's kernel was tried on GPUs of this compute capability; None if the kernel is not
    ours."""
    if not isinstance(layout, OwnKernel):
        return None
    return _how(layout.run_on, layout.translated_for, capability)


Capabilities = tuple[tuple[int, int], ...]


def _how(run_on: Capabilities, translated_for: Capabilities, capability: tuple[int, int]) -> Tried:
    if capability in run_on:
        return "run"
    return "run through translation" if capability in translated_for else "compiled only"


def kv_tried_on(device: torch.device, kv_formats: Iterable[str]) -> dict[str, Tried]:
    """Return how the kernels of each KV format were tried on GPUs like `device`; empty if none runs there."""
    if device.type != "cuda":
        return {}
    capability = torch.cuda.get_device_capability(device)
    if capability < KV_COMPILED_FROM:
        return {}
    translated_for = {name: KV_TRANSLATED_FOR.get(name.partition("_")[0], ()) for name in kv_formats}
    return {name: _how(KV_RUN_ON, translated, capability) for name, translated in translated_for.items()}


def tried_on(layout: AnyLayout, device: torch.device) -> Tried | None:
    """Return how the layout's kernel was tried on GPUs like `device`; None on a CPU."""
    return tried(layout, torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def tried_of(plan: LayoutPlan, device: torch.device) -> dict[str, Tried]:
    """Return how each layout of ours that a plan has measurements of was tried."""
    measured = dict.fromkeys(name for choice in plan.choices for name in choice.measured_layouts)
    return {name: how for name in measured if (how := tried_on(LAYOUTS[name], device)) is not None}


def kv_tried_of(plan: LayoutPlan, device: torch.device) -> dict[str, Tried]:
    """Return how the kernels of each KV format that a plan has times of were tried."""
    return kv_tried_on(device, dict.fromkeys(timing.kv_format for timing in plan.kv))


def remark(layout: AnyLayout, device: torch.device) -> str:
    """Return a remark to add to the reason for choosing a layout; empty if we ran its kernel on such a
    GPU.
    """
    how = tried_on(layout, device)
    return "" if how in (None, "run") else f"; our kernel, {how} for such a GPU so far, was checked here"
