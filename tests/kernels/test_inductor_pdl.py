"""Compiled kernels under programmatic dependent launch wait for the kernel ahead before they touch memory."""

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("triton")

import torch
import torch._inductor.config
import triton
from scalegate.kernels import inductor_pdl
from torch import Tensor
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.runtime.hints import DeviceProperties
from triton.backends.compiler import GPUTarget

HOPPER = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)
Function = Callable[..., Tensor | tuple[Tensor, Tensor]]
Write = Callable[[Function, AbstractContextManager[None]], list[list[str]]]


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    total = x + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def gated(x: Tensor, *_: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def two_that_share_nothing(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), (residual * weight).cumsum(-1)


def filled(x: Tensor, *_: Tensor) -> Tensor:
    return torch.arange(len(x) * 7)


FUNCTIONS = [norm, gated, two_that_share_nothing, filled]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """The kernels that Inductor writes for a function, line by line, as for a Hopper that is not there."""
    # torch's compiler sets it for the rest of the process if nobody has.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: HOPPER)
    monkeypatch.setattr(TritonKernel, "_enable_pdl_codegen", staticmethod(lambda: True))
    kernels: list[list[str]] = []
    codegen = TritonKernel.codegen_kernel

    def noting(kernel: TritonKernel, *args: object, **kwargs: object) -> str:
        text = codegen(kernel, *args, **kwargs)
        kernels.append(text[text.index("def ") :].splitlines())
        return text

    monkeypatch.setattr(TritonKernel, "codegen_kernel", noting)

    def write(function: Function, way: AbstractContextManager[None]) -> list[list[str]]:
        kernels.clear()
        torch.compiler.reset()
        inputs = torch.randn(37, 2560), torch.randn(37, 2560), torch.randn(2560)
        with (
            way,
            torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False),
            contextlib.suppress(torch._inductor.exc.InductorError),  # There is nothing to run them on.
        ):
            torch.compile(function)(*inputs)
        return list(kernels)

    return write


def touches(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(r"\btl\.(load|store|atomic)", line)]


def waits(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if "gdc_wait" in line]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_kernel_waits_once_before_it_touches_memory(function: Function, written: Write):
    kernels = written(function, inductor_pdl.waiting_first())
    assert kernels
    for lines in kernels:
        assert len(waits(lines)) == 1 and waits(lines)[0] < min(touches(lines))
        assert sum("gdc_launch_dependents" in line for line in lines) == 1


def test_the_compiler_left_alone_would_not(written: Write):
    """Negative control: a kernel that reads nothing of the one just ahead even stores before it waits."""
    kernels = written(two_that_share_nothing, contextlib.nullcontext())
    assert any(waits(lines)[0] > min(touches(lines)) for lines in kernels if waits(lines))
