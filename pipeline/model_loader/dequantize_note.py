"""The notice that quantized layers are dequantized anew for every product, which is right but slow.

That happens if every other layout refuses a format, a dtype or a device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ...layouts.choosing.choose import default_layout
from ...layouts.packing.layout import Problem

DEQUANTIZE = "dequantize"
"""The names of such layouts end with it."""


def dequantized_note(problems: Mapping[str, Problem], layouts: Mapping[str, str]) -> str | None:
    """One sentence on the products that are dequantized; None if there are none.

    problems: by the product's name, as it is served
    layouts:  the layout that each got
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


def _has_a_kernel(problems: Iterable[Problem]) -> bool:
    return not any(default_layout(problem).endswith(DEQUANTIZE) for problem in problems)
