"""Barriers in Inductor's loops that store what they read: all threads have read before one stores, and stored
before one reads again.

A short row has fewer elements than a program has threads, and several then hold the same ones. In a loop of a
reduction one of them could store a sum over what another had yet to read, which then added twice: one norm in
a few thousand was wrong. Inductor puts such a barrier where the index of a load is broadcast (triton issue
1615), and not where threads are more than elements. Reductions that are not loops store after all is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BARRIER = "tl.debug_barrier()"


@contextmanager
def barriers_in_loops() -> Iterator[None]:
    """While open, kernels are compiled with them."""
    # Imported here: a compiler takes seconds to load.
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    load, store = TritonKernel.load, TritonKernel.store

    def load_after_stores(kernel: Any, name: str, *rest: Any, **named: Any) -> Any:
        stored = kernel.__dict__.get("stored_in_loops", set())
        if name in stored and _is_loop(kernel):
            # An earlier loop stored it; the body now has what comes before this one.
            stored.clear()
            kernel.body.writeline(BARRIER)
        return load(kernel, name, *rest, **named)

    def store_after_loads(kernel: Any, name: str, *rest: Any, **named: Any) -> None:
        if _is_loop(kernel):
            kernel.__dict__.setdefault("stored_in_loops", set()).add(name)
            if name in kernel.args.inplace_buffers:
                kernel.stores.writeline(DeferredLine(name, BARRIER))
        store(kernel, name, *rest, **named)

    kernel_class: Any = TritonKernel
    kernel_class.load, kernel_class.store = load_after_stores, store_after_loads
    try:
        yield
    finally:
        kernel_class.load, kernel_class.store = load, store


def _is_loop(kernel: Any) -> bool:
    return bool(kernel.inside_reduction and kernel.range_trees[-1].is_loop)
