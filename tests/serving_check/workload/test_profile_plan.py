"""Requests of a profile: lengths as the trace has them, scaled by one factor, and how many of them."""

import random
from statistics import fmean

import pytest
from scalegate.serving_check.profiles import PROFILES
from scalegate.serving_check.workload.profile_plan import (
    LEAST_REQUESTS,
    LOAD,
    ProfileShape,
    plan_profile,
    shape_of_profile,
)

TEXT = random.Random(1).choices(range(1, 8000), k=20_000)
NAMES = list(PROFILES)
MANY = 400


def planned(name: str, shape: ProfileShape, seed: int = 0):
    return plan_profile(seed, PROFILES[name], shape, TEXT)


def below_and_up_to(length: float, found: list[int]) -> tuple[float, float]:
    """The shares that are shorter than the whole number before `length`, and that are at most as long."""
    return fmean(drawn < int(length) for drawn in found), fmean(drawn <= length for drawn in found)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_answers_are_as_long_as_those_of_the_trace(name: str, scale: float):
    """One of each equal part of the distribution, so each quantile is met to within one part."""
    profile, requests = PROFILES[name], planned(name, ProfileShape(MANY, 60.0, scale))
    prompts, answers = (
        [len(request.prompt) for request in requests],
        [request.output_len for request in requests],
    )
    for lengths, found in ((profile.prompts, prompts), (profile.answers, answers)):
        # Shorter ones than the shortest that are sent are longer than the trace's.
        for share, tokens in ((share, tokens) for share, tokens in lengths.quantiles if tokens >= 32):
            below, up_to = below_and_up_to(scale * tokens, found)
            assert below - 1 / MANY <= share <= up_to + 1 / MANY, (tokens, below, up_to)
    assert fmean(prompts) == pytest.approx(scale * profile.prompts.mean, rel=0.02)


def test_a_mean_is_that_of_the_trace():
    """As the traces' files have it; quantiles keep it to within a few percent."""
    assert PROFILES["chat"].prompts.mean == pytest.approx(1155, rel=0.05)
    assert PROFILES["chat"].answers.mean == pytest.approx(211, rel=0.05)
    assert PROFILES["rag"].prompts.mean == pytest.approx(2944, rel=0.05)
    assert PROFILES["rag"].answers.mean == pytest.approx(283, rel=0.05)
    assert PROFILES["code"].prompts.mean == pytest.approx(2048, rel=0.05)
    assert PROFILES["code"].answers.mean == pytest.approx(28, rel=0.15)


def test_a_plan_is_a_function_of_its_seed_and_no_two_prompts_begin_alike():
    shape = ProfileShape(40, 3.0, 0.2)
    requests = planned("rag", shape)
    assert requests == planned("rag", shape) != planned("rag", shape, seed=1)
    assert len(requests) == 40 == len({request.prompt[:16] for request in requests})
    times = [request.at for request in requests]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 3.0


def test_requests_come_at_a_part_of_the_speed_that_the_baseline_has():
    chat = PROFILES["chat"]
    shape = shape_of_profile(chat, 60.0, 20_000, 4_000, context=8192, longest_prompt=8192)
    work = chat.prompts.mean / 20_000 + chat.answers.mean / 4_000
    assert shape.scale == 1.0
    assert shape.requests == int(60 * LOAD / work) > LEAST_REQUESTS
    assert shape.seconds == pytest.approx(shape.requests * work / LOAD) and shape.seconds <= 60


@pytest.mark.parametrize(
    ("limits", "scale"),
    [
        ({"context": 4096}, 4096 / PROFILES["rag"].longest_request),
        ({"longest_prompt": 2000}, 2000 / PROFILES["rag"].prompts.longest),
    ],
)
def test_all_lengths_are_scaled_alike_where_the_longest_does_not_fit(limits: dict[str, int], scale: float):
    fits = {"context": 8192, "longest_prompt": 8192}
    shape = shape_of_profile(PROFILES["rag"], 60.0, 20_000, 4_000, **(fits | limits))
    assert shape.scale == pytest.approx(scale)
    requests = planned("rag", shape)
    assert max(len(request.prompt) + request.output_len for request in requests) <= 4096
    assert min(len(request.prompt) for request in requests) >= int(scale * 1052)


def test_a_slow_machine_gets_shorter_requests_rather_than_a_longer_run():
    shape = shape_of_profile(PROFILES["rag"], 10.0, 1_000, 200, context=8192, longest_prompt=8192)
    assert shape.requests == LEAST_REQUESTS and shape.scale < 1
    assert shape.seconds == pytest.approx(10.0)
