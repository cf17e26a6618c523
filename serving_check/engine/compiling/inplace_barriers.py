"""Barriers in Inductor's loops that update a buffer in place, between reading and storing.

If a row has fewer elements than a program has threads, several threads hold the same elements. In the loop of
a reduction, one thread could store a sum before another thread had read the old value, so that the other
thread added twice: one norm in a few thousand was wrong. Inductor adds such a barrier if the index of a load
is broadcast (triton issue 1615), but not in this case. Reductions without loops store after everything is
read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BARRIER = "tl.debug_barrier()"


@contextmanager
def barriers_in_loops() -> Iterator[None]:
    """Compile kernels with barriers in their loops while the `with` block is open."""
    # Imported here: a compiler takes seconds to load.
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    load, store = TritonKernel.load, TritonKernel.store

    def load_after_stores(kernel: Any, name: str, *rest: Any, **named: Any) -> Any:
        stored = kernel.__dict__.get("stored_in_loops", set())
        if name in stored and _is_loop(kernel):
            # An earlier loop stored it. The body now holds the code before this loop.
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
