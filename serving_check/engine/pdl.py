"""Kernels of compiled layers as programmatic dependents: launched while the kernel ahead of them still runs.

Not for kernels of our own, which say so themselves. Inductor can make such kernels (`triton.enable_pdl`), but
they wait for no more than what the kernel just ahead wrote, and let the next one start when they have read.
Here each lets the next one start at once, and waits for the one ahead before it touches memory: whoever reads
what a kernel wrote then waits for its end, however many kernels lie between, since all of these wait too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PARTS = ("_handle_pdl_before_access", "_handle_pdl_after_load", "_filter_pdl", "GDC_WAIT", "GDC_LAUNCH")
"""Of Inductor's, as they are in torch 2.11 to 2.13; without them kernels are launched as ever."""


def options() -> dict[str, bool]:
    """The compiler's; it heeds them where the device can launch dependents."""
    return {"triton.enable_pdl": True} if _supported() else {}


@contextmanager
def waiting_first() -> Iterator[None]:
    """While open, what is compiled with these options waits before it touches memory."""
    if not _supported():
        yield
        return
    kernel = _inductor_kernel()
    before = {name: getattr(kernel, name) for name in PARTS[:2]}
    kernel._handle_pdl_before_access = _wait
    kernel._handle_pdl_after_load = _nothing
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kernel, name, method)


def _supported() -> bool:
    # Imported here: a compiler takes seconds to load.
    import torch._inductor.config as config

    return hasattr(config.triton, "enable_pdl") and all(hasattr(_inductor_kernel(), name) for name in PARTS)


def _inductor_kernel() -> Any:
    from torch._inductor.codegen.triton import TritonKernel

    return TritonKernel


def _wait(kernel: Any, lines: Any, *_: str, consider_reads: bool = False) -> None:
    """Before an access: of several such lines Inductor keeps the first."""
    if kernel._enable_pdl_codegen():
        in_loop = kernel.inside_reduction and kernel.range_trees[-1].is_loop
        (kernel.body if in_loop else lines).writeline(f"{kernel.GDC_LAUNCH}; {kernel.GDC_WAIT}")


def _nothing(*_: Any) -> None:
    """After a load: the next kernel is on its way already."""
