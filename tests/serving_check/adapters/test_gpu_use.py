"""What NVIDIA's library tells of GPUs, and that nothing is told without it."""

import pytest
import torch
from scalegate.serving_check.adapters.gpu_use import gpu_use


def test_the_busiest_gpu_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "utilization", {0: 3, 1: 41, 2: 100}.__getitem__)
    assert gpu_use([0, 1]) == 0.41
    assert gpu_use([]) is None


def test_nothing_is_told_without_the_library(monkeypatch: pytest.MonkeyPatch):
    def missing(gpu: int) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert gpu_use([0]) is None
