"""The engine's account of its own time: the host's share of steps, and the device's pauses between them."""

import time
from pathlib import Path

import pytest
import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams, StepTimes
from scalegate.serving_check.engine.step_clock import StepClock
from transformers import AutoModelForCausalLM

PAUSE = 0.02
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def test_a_cpus_host_share_leaves_out_the_models_own_work():
    clock = StepClock(torch.device("cpu"))
    with clock.step():
        time.sleep(PAUSE)
        with clock.launch():
            time.sleep(3 * PAUSE)
    times = clock.times()
    assert times.step_seconds >= 4 * PAUSE
    assert PAUSE <= times.host_seconds <= times.step_seconds - 3 * PAUSE
    assert times.device_busy_seconds is None and times.device_idle_seconds is None
    clock.reset()
    assert clock.times() == StepTimes()


@pytest.fixture(scope="module")
def engine(example_checkpoint: Path) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(example_checkpoint, dtype=torch.float32).cuda().eval()
    sizes = EngineOptions(max_num_seqs=8, max_model_len=256, decode_buckets=(1, 8), compiled=False)
    engine = Engine(model, sizes, frozenset())
    engine.warm_up(progress=False)
    return engine


def times_of(engine: Engine, pause: float) -> StepTimes:
    """Of 24 steps for eight requests, with a pause of the caller's after each."""
    engine.runner.clock.reset()
    for index in range(8):
        engine.add_request(str(index), [index + 1], GREEDY)
    while engine.has_work:
        engine.step()
        time.sleep(pause)
    return engine.stats().times


@pytest.mark.gpu
def test_a_gpu_left_idle_between_steps_is_noticed_and_one_without_requests_is_not(engine: Engine):
    kept_busy, paused = times_of(engine, 0.0), times_of(engine, PAUSE)
    assert kept_busy.device_idle_seconds is not None and paused.device_idle_seconds is not None
    assert paused.device_idle_seconds > 20 * PAUSE * 0.8
    assert kept_busy.device_idle_seconds < 0.1 * paused.device_idle_seconds
    assert paused.device_busy_seconds == pytest.approx(kept_busy.device_busy_seconds, rel=1.0)
    time.sleep(10 * PAUSE)
    again = times_of(engine, 0.0)
    assert again.device_idle_seconds is not None
    assert again.device_idle_seconds < 5 * PAUSE
