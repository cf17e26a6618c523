"""Compilations of torch and numba after warm-up are noticed; what was met in warm-up is not."""

import numba
import pytest
import torch
from scalegate.serving_check.engine.jit_monitor import JitError, JitMonitor


@pytest.fixture
def monitor():
    monitor = JitMonitor()
    yield monitor
    monitor.disarm()


def test_a_recompilation_is_noticed_and_a_known_size_is_not(monitor: JitMonitor):
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(3))
    monitor.arm()
    double(torch.zeros(3))
    assert monitor.events == []
    double(torch.ones(4))
    assert [event.kind for event in monitor.events] == ["dynamo compilation"]
    monitor.disarm()
    double(torch.ones(5))
    assert len(monitor.events) == 1


def test_a_compilation_of_numba_is_noticed_and_a_known_type_is_not(monitor: JitMonitor):
    double = numba.njit(lambda x: x * 2)
    double(3)
    monitor.arm()
    double(4)
    assert monitor.events == []
    double(4.5)
    assert [(event.kind, event.key) for event in monitor.events] == [("numba compilation", "(float64,)")]


def test_a_strict_monitor_raises_when_asked_after_a_step():
    monitor = JitMonitor("error")
    double = torch.compile(lambda x: x * 3, backend="eager", dynamic=False)
    monitor.arm()
    monitor.check()
    double(torch.ones(3))
    monitor.disarm()
    with pytest.raises(JitError, match="dynamo compilation"):
        monitor.check()


def test_a_monitor_that_is_off_hears_nothing():
    monitor = JitMonitor("off")
    monitor.arm()
    torch.compile(lambda x: x * 4, backend="eager", dynamic=False)(torch.ones(3))
    assert monitor.events == []
