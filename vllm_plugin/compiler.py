"""Compiles kernels before they are needed, in processes of their own; what `compile_ahead.py` starts.

It fills Triton's cache on disk, where the process that serves then finds the kernels. It touches no GPU, and
does not import vLLM. Each line of its input names layers of one shape; at the end of the input it waits for
all that it has begun.
"""

import json
import multiprocessing
import sys
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..kernels.triton_imports import triton
from ..layouts.formats.weight_format import spec_from_json
from .choice import LAYOUTS
from .warm_up import multiply_zeros, rows_by_form


class HopperAlone:
    """Takes the place of Triton's driver: a GPU to compile for, which runs nothing."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compile_in_place_of_launching()
    context = multiprocessing.get_context("fork")
    begun: set[object] = set()
    processes: list[BaseProcess] = []
    for line in sys.stdin:
        layer = json.loads(line)
        layout, spec, dtype = layer["layout"], spec_from_json(layer["spec"]), getattr(torch, layer["dtype"])
        packed = LAYOUTS[layout].pack(spec.random(layer["n"], layer["k"], torch.device("meta")), dtype)
        for form, m in rows_by_form(LAYOUTS[layout], packed, layer["most"]).items():
            kernel = layout, spec.key, dtype, form
            if kernel not in begun:
                begun.add(kernel)
                processes.append(context.Process(target=multiply_zeros, args=(LAYOUTS[layout], packed, m)))
                processes[-1].start()
    for process in processes:
        process.join()


def compile_in_place_of_launching() -> None:
    """Have Triton compile every kernel that is launched in this process, and launch none."""
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, warmup=True, **options)

    triton.runtime.jit.JITFunction.run = compile_only
    triton.runtime.driver.set_active(HopperAlone())


if __name__ == "__main__":
    main()
