"""Triton and Gluon under the names that our kernels use, or a stand-in where Triton is not installed.

With the stand-in, kernel files can be imported on macOS and Windows for their torch references and host code.
Kernels cannot be launched with the stand-in; without CUDA no layout is chosen that would launch a kernel.
"""

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.core import _aggregate as aggregate
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime.jit import JITFunction, constexpr_function

    from .triton_versions import (
        FOUR_IN_A_ROW,
        SCALES_ON_12_1,
        WHOLE_VIEWS,
        reinterpret,
        thread_barrier,
        tma_load,
        tma_store,
    )
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise

    class Constant:
        """The host's substitute for `tl.constexpr`."""

        def __init__(self, value: Any):
            self.value = value

    class StandIn:
        """A stand-in for a module: each of its attributes is the stand-in itself, and as a decorator it
        returns the decorated function unchanged.
        """

        cdiv = staticmethod(lambda x, y: -(-x // y))
        constexpr = Constant
        next_power_of_2 = staticmethod(lambda n: 1 << (n - 1).bit_length() if n > 0 else n)

        def __getattr__(self, name: str) -> "StandIn":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, decorated: Any = None, *arguments: Any, **options: Any) -> Any:
            return decorated if callable(decorated) else self

        def _itself(self, other: Any) -> "StandIn":
            return self

        __or__ = __ror__ = __mul__ = __rmul__ = _itself

    triton = tl = gluon = gl = StandIn()
    fence_async_shared = mma_v2 = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = triton
    tensor_descriptor = TensorDescriptor = aggregate = triton
    gdc_launch_dependents = gdc_wait = JITFunction = constexpr_function = triton
    reinterpret = thread_barrier = tma_load = tma_store = triton
    WHOLE_VIEWS = SCALES_ON_12_1 = FOUR_IN_A_ROW = False

__all__ = [
    "FOUR_IN_A_ROW",
    "SCALES_ON_12_1",
    "WHOLE_VIEWS",
    "JITFunction",
    "TensorDescriptor",
    "aggregate",
    "constexpr_function",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "tensor_descriptor",
    "thread_barrier",
    "tl",
    "tma",
    "tma_load",
    "tma_store",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
