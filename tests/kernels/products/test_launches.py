"""The stream-K kernel is compiled once for everything that Triton would compile it for."""

import weakref
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from scalegate.kernels.hopper import gemm, stream_k, stream_k_config
from scalegate.kernels.hopper.packed_operand import PackedOperand, x_layout
from scalegate.kernels.int4.decoder import Int4Decoder
from scalegate.kernels.triton_imports import TensorDescriptor

N, K = 128, 256
ACTIVATIONS, SEMAPHORES, ROWS = 1, 8, 9
"""Places of arguments behind the grid."""


class Kernel:
    """Takes the place of the kernel, and remembers the arguments of its launches."""

    def __init__(self):
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled.append((grid, *arguments))
            return CompiledKernel(self)

        return launch


class CompiledKernel:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(stream_k, "stream_k_kernel", found)
    monkeypatch.setattr(stream_k, "COMPILED", {})
    return found


def operand(dtype: torch.dtype, ahead: int = 0) -> PackedOperand:
    """A weight of zeros. `ahead`: int32 numbers that lie in front of its semaphores."""
    words = torch.zeros(N // 64, K // 64, 512, dtype=torch.int32)
    scales = torch.zeros(K // 128, N, dtype=torch.int32)
    semaphores = torch.zeros(1024 + ahead, dtype=torch.int32)[ahead:]
    return PackedOperand(words, scales, semaphores, Int4Decoder(dtype == torch.float16, 128, False))


def multiply(weight: PackedOperand, m: int, dtype: torch.dtype = torch.bfloat16) -> None:
    gemm.matmul(torch.zeros(m, K, dtype=dtype), weight, N)


def test_a_second_launch_takes_the_compiled_kernel_with_its_own_arguments(kernel):
    first, second = operand(torch.bfloat16), operand(torch.bfloat16)
    multiply(first, 3)
    multiply(second, 5)
    [compiled], [launched] = kernel.compiled, kernel.launched
    assert len(launched) == len(compiled)
    assert compiled[SEMAPHORES] is first.semaphores and compiled[ROWS] == 3
    assert launched[SEMAPHORES] is second.semaphores and launched[ROWS] == 5


def test_a_later_launch_loads_its_own_activations_of_its_own_shape(kernel):
    weight = operand(torch.bfloat16)
    for m in (3, 5, 7):
        gemm.matmul(torch.zeros(16, 2 * K, dtype=torch.bfloat16)[:m, :K], weight, N)
    assert len(kernel.compiled) == 1 and len(kernel.launched) == 2
    for m, launched in zip((5, 7), kernel.launched, strict=True):
        checked = TensorDescriptor.from_tensor(launched[ACTIVATIONS].base, [8, 256], x_layout())
        assert launched[ACTIVATIONS] == checked
        assert tuple(checked.shape) == (m, K) and tuple(checked.strides) == (2 * K, 1)


def test_activations_are_freed_after_their_launch(kernel):
    weight = operand(torch.bfloat16)
    for _ in range(3):
        x = torch.zeros(4, K, dtype=torch.bfloat16)
        gemm.matmul(x, weight, N)
        kernel.compiled.clear()
        kernel.launched.clear()
        gone = weakref.ref(x)
        del x
        assert gone() is None


@pytest.mark.parametrize("what", ["tile", "dtype", "type of y", "alignment"])
def test_what_it_was_not_compiled_for_is_compiled(kernel, what):
    multiply(operand(torch.bfloat16), 8)
    if what == "tile":
        multiply(operand(torch.bfloat16), 64)
    elif what == "type of y":  # as where activations are E4M3, whatever the model's type
        x, y = torch.zeros(8, K, dtype=torch.bfloat16), torch.zeros(8, N, dtype=torch.float16)
        stream_k.launch(x, operand(torch.bfloat16), y, stream_k_config.config_for(8, N, K))
    elif what == "dtype":
        multiply(operand(torch.float16), 8, torch.float16)
    else:
        multiply(operand(torch.bfloat16, ahead=1), 8)
    assert len(kernel.compiled) == 2 and not kernel.launched


def test_more_rows_than_a_launch_takes_are_several_launches(kernel):
    multiply(operand(torch.bfloat16), gemm.MAX_ROWS + 1)
    rows = [arguments[ROWS] for arguments in kernel.compiled + kernel.launched]
    assert rows == [gemm.MAX_ROWS, 1]
