"""Compiles kernels before they are needed, in processes of their own; what `compile_ahead.py` starts.

It fills Triton's cache on disk, where the process that serves then finds the kernels. It touches no GPU, and
does not import vLLM. Each line of its input describes layers of one kind; at an empty line, or at the end of
the input, it waits for all that it has begun. Its exit status is 1 if something was not compiled.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from ..kernels.triton_imports import triton
from ..layouts.formats.int4 import Int4
from ..layouts.formats.nvfp4 import NVFP4
from ..layouts.formats.weight_format import WeightFormat, spec_from_json
from . import experts_product
from .choice import EXPERTS, LAYOUTS
from .warm_up import multiply_zeros, rows_by_form

META = torch.device("meta")
GPU = torch.device("cuda", 0)
HOPPER = (9, 0)
LESS_URGENT = 10
"""What is added to the niceness: vLLM's own start goes first."""

Forms = Iterator[tuple[object, Callable[[], None]]]
"""Names of forms of kernels, and for each a function that multiplies by one."""


class HopperAlone:
    """Takes the place of Triton's driver: a GPU to compile for, which runs nothing."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 10 * HOPPER[0] + HOPPER[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    os.nice(LESS_URGENT)
    compile_in_place_of_launching()
    context = multiprocessing.get_context("fork")
    begun: dict[object, BaseProcess] = {}
    for line in sys.stdin:
        if not line.strip():
            break
        for form, multiply in forms_of(json.loads(line)):
            if form not in begun:
                begun[form] = context.Process(target=multiply)
                begun[form].start()
    for process in begun.values():
        process.join()
    sys.exit(any(process.exitcode for process in begun.values()))


def forms_of(layer: dict[str, Any]) -> Forms:
    """Return all forms of the kernels that layers of a kind use."""
    spec, dtype = spec_from_json(layer["spec"]), getattr(torch, layer["dtype"])
    return forms_of_experts(layer, spec, dtype) if "experts" in layer else forms_of_linear(layer, spec, dtype)


def forms_of_linear(layer: dict[str, Any], spec: WeightFormat, dtype: torch.dtype) -> Forms:
    layout = LAYOUTS[layer["layout"]]
    packed = layout.pack(spec.random(layer["n"], layer["k"], META), dtype)
    for form, m in rows_by_form(layout, packed, layer["most"]).items():
        yield (layout.name, spec.key, dtype, form), partial(multiply_zeros, layout, packed, m)


def forms_of_experts(layer: dict[str, Any], spec: WeightFormat, dtype: torch.dtype) -> Forms:
    count, top_k, hidden, inner = (layer[name] for name in ("experts", "top_k", "hidden", "inner"))
    gate_up, down = (
        EXPERTS[type(spec)].pack_experts([spec.random(n, k, META)] * count, dtype)
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    products = experts_product.products_of(cast(Int4 | NVFP4, spec), gate_up, down)
    for tokens in experts_product.tokens_to_compile(count, top_k, layer["most"]):
        zeros = experts_product.zeros_for(products, top_k, dtype, tokens)
        form = spec.key, count, top_k, hidden, inner, dtype, tokens
        yield form, partial(multiply_as_on_a_gpu, products, zeros)


def multiply_as_on_a_gpu(products: experts_product.Products, zeros: tuple[Any, ...]) -> None:
    """Multiply tensors without memory, which say that they are on a GPU: the kernels of experts ask."""
    torch.Tensor.device = property(lambda tensor: GPU)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: HOPPER
    with WithoutMemory():
        products.multiply(*zeros)


class WithoutMemory(TorchFunctionMode):
    """No tensor that is made has memory, wherever it is asked for."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if options.get("device") is not None:
            options["device"] = META
        return function(*arguments, **options)


def compile_in_place_of_launching() -> None:
    """Have Triton compile every kernel that is launched in this process, and launch none."""
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, warmup=True, **options)

    triton.runtime.jit.JITFunction.run = compile_only
    triton.runtime.driver.set_active(HopperAlone())


if __name__ == "__main__":
    main()
