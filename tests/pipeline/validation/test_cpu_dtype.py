"""The dtype a CPU's baseline runs in: the faster of bfloat16 and float32, unless somebody has chosen."""

import time
from pathlib import Path

import pytest
import torch
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation import cpu_dtype
from scalegate.serving_check.engine.options import EngineOptions

pytestmark = pytest.mark.numeric


@pytest.fixture
def slow(monkeypatch):
    """Products that take time in one dtype alone, so that a CPU that emulates the other has no say."""

    def slow_down(dtype: torch.dtype) -> None:
        def slowed(x: torch.Tensor, weight: torch.Tensor) -> None:
            assert x.dtype == weight.dtype
            if x.dtype == dtype:
                time.sleep(0.002)

        monkeypatch.setattr(cpu_dtype, "linear", slowed)

    return slow_down


@pytest.mark.parametrize(("slow_one", "expected"), [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")])
def test_the_faster_one_is_taken(slow, slow_one, expected):
    slow(slow_one)
    threads = torch.get_num_threads()
    assert cpu_dtype.faster_dtype(256, 256, (1, 32)) == expected
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(device="cpu"), "float32"),
        (EngineOptions(device="cpu", dtype="bfloat16"), "bfloat16"),
        (EngineOptions(device="cuda"), "auto"),
    ],
)
def test_only_a_cpu_that_was_left_the_choice_is_asked(
    slow, example_checkpoint: Path, options: EngineOptions, expected: str
):
    slow(torch.bfloat16)
    assert cpu_dtype.baseline_dtype(open_checkpoint(str(example_checkpoint)), options, (1, 32)) == expected
