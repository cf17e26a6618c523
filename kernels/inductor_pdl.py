"""Programmatic dependent launch (PDL) of Inductor's kernels: each starts while its predecessor still runs.

Our own kernels call `gdc_wait` and `gdc_launch_dependents` themselves. Inductor can emit both calls
(`triton.enable_pdl`), but its kernels wait only before they read what the predecessor wrote, and launch the
next kernel after their loads. With this module, a kernel launches the next one at once and waits before its
first memory access. Since every kernel waits until its predecessor has ended, it sees the writes of all
kernels before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PARTS = ("_handle_pdl_before_access", "_handle_pdl_after_load", "_filter_pdl", "GDC_WAIT", "GDC_LAUNCH")
"""Attributes of Inductor's `TritonKernel` in torch 2.11 to 2.13. Without them there is no PDL."""


def options() -> dict[str, bool]:
    """Return compiler options for PDL, which the compiler uses on devices that support it."""
    return {"triton.enable_pdl": True} if _supported() else {}


@contextmanager
def waiting_first() -> Iterator[None]:
    """Make kernels compiled with these options wait before their first memory access, while the block is
    open.
    """
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
    """Emit a wait before each memory access; Inductor keeps only the first wait."""
    if kernel._enable_pdl_codegen():
        in_loop = kernel.inside_reduction and kernel.range_trees[-1].is_loop
        (kernel.body if in_loop else lines).writeline(f"{kernel.GDC_LAUNCH}; {kernel.GDC_WAIT}")


def _nothing(*_: Any) -> None:
    """Emit nothing after a load, since the next kernel is launched already."""
