"""Notices for quantized layers that are served correctly but slowly.

Layers are dequantized anew for every product if every other layout refuses a format, a dtype or a device;
formats that round inputs are emulated if no layout multiplies rounded inputs by themselves on a device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ...layouts.choosing.choose import default_layout
from ...layouts.formats.input_format import dynamic_input
from ...layouts.packing.all_layouts import LAYOUTS
from ...layouts.packing.layout import Problem, emulates_inputs

DEQUANTIZE = "dequantize"
"""The end of the names of layouts that dequantize a weight for every product."""


def dequantized_note(problems: Mapping[str, Problem], layouts: Mapping[str, str]) -> str | None:
    """Return one sentence on the products that are dequantized; None if there are none.

    problems: the problem of each product, by the product's name in serving
    layouts:  the layout of each product
    """
    slow = [problems[name] for name, layout in layouts.items() if layout.endswith(DEQUANTIZE)]
    if not slow:
        return None
    first = slow[0]
    dtype = str(first.dtype).removeprefix("torch.")
    advice = (
        "`--dtype bfloat16` has a kernel for it"
        if _has_a_kernel([replace(problem, dtype=torch.bfloat16) for problem in slow])
        else "`pipeline layout` measures what else there is, `pipeline doctor` says what could be installed"
    )
    return (
        f"{len(slow)} of {len(layouts)} quantized products ({first.spec.label}) are dequantized anew at "
        f"every step: no layout is preferred for them in {dtype} on {first.device.type}. {advice}."
    )


def emulation_note(problems: Mapping[str, Problem], layouts: Mapping[str, str]) -> str | None:
    """Return one sentence on the products that emulate a format of inputs; None if there are none.

    problems: the problem of each product, by the product's name in serving
    layouts:  the layout of each product
    """
    emulated = [
        problems[name]
        for name, layout in layouts.items()
        if dynamic_input(problems[name].spec) is not None and emulates_inputs(LAYOUTS[layout])
    ]
    if not emulated:
        return None
    first = emulated[0]
    bits = 32 if first.device.type == "cpu" else 16
    return (
        f"{len(emulated)} of {len(problems)} quantized products ({first.spec.label}) are emulated: inputs "
        f"are rounded as the format says and multiplied in {bits} bits. Quality is the format's; speed is "
        "not that of hardware that multiplies it."
    )


def _has_a_kernel(problems: Iterable[Problem]) -> bool:
    return not any(default_layout(problem).endswith(DEQUANTIZE) for problem in problems)
