"""What Triton compiles, tunes or loads from its cache after warm-up is noticed, by name and key."""

import contextlib

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from scalegate.serving_check.engine.jit_monitor import JitMonitor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit
def specializing_kernel(target, n):
    tl.store(target, n)


@triton.jit(do_not_specialize=["n"])
def indifferent_kernel(target, n):
    tl.store(target, n)


@pytest.fixture
def monitor():
    monitor = JitMonitor()
    yield monitor
    monitor.disarm()


def test_triton_compilations_are_told_from_cache_loads(monitor: JitMonitor, tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    source = ASTSource(specializing_kernel, {"target": "*i32", "n": "i32"})
    monitor.arm()
    for _ in range(2):
        triton.compile(source, target=HOPPER)
    assert [event.kind for event in monitor.events] == ["triton compilation", "triton cache load"]
    assert all(event.name == "specializing_kernel" and "i32" in event.key for event in monitor.events)


def test_autotuning_is_noticed_for_each_new_key_though_nothing_is_compiled(monitor: JitMonitor):
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2)]
    tuned = triton.autotune(configs, key=["n"], do_bench=lambda call, quantiles: [1.0] * 3)(
        specializing_kernel
    )
    monitor.arm()
    for n in (5, 5, 6):
        # Only the launch that follows needs a GPU, and fails without one.
        with contextlib.suppress(RuntimeError):
            tuned[(1,)](torch.zeros(1), n)
    tunings = [event for event in monitor.events if event.kind == "triton autotuning"]
    assert [(event.name, event.key) for event in tunings] == [
        ("specializing_kernel", "n=5"),
        ("specializing_kernel", "n=6"),
    ]


@pytest.mark.gpu
def test_a_kernel_that_specializes_on_a_running_size_is_caught(monitor: JitMonitor):
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    for kernel in (specializing_kernel, indifferent_kernel):
        kernel[(1,)](target, 17)
    monitor.arm()
    for n in (19, 32, 1, 48):
        indifferent_kernel[(1,)](target, n)
    assert monitor.events == []
    specializing_kernel[(1,)](target, 19)
    assert monitor.events == []
    specializing_kernel[(1,)](target, 32)
    assert [event.name for event in monitor.events] == ["specializing_kernel"]
