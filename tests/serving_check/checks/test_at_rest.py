"""The checks `at rest` and `drift`, passing and failing, on made-up figures."""

from dataclasses import replace

import pytest
from scalegate.serving_check.checks.in_use.at_rest import (
    MOST_BYTES_A_REQUEST,
    bytes_a_request,
    check_at_rest,
    shows_growth,
)
from scalegate.serving_check.checks.in_use.drift import check_drift
from scalegate.serving_check.evidence.at_rest import AtRestFigures, BurstPart, Rest

REST = Rest(running=0, waiting=0, kv_cache_usage=0.0, memory_bytes=1 << 30)
WOBBLE = (1.0, 1.04, 0.97, 1.02, 0.99, 1.03, 0.96, 1.01)
"""Of eight parts or repeats, a machine's ordinary noise."""
MIB = 1 << 20


def burst(*seconds: float, requests: int = 500, bytes_a_request: float = 0.0) -> tuple[BurstPart, ...]:
    return tuple(
        BurstPart(requests, time, int((1 << 30) + bytes_a_request * requests * (index + 1)))
        for index, time in enumerate(seconds)
    )


def speeds(factor: float, count: int = 6) -> tuple[float, ...]:
    return tuple(500 * factor * wobble for wobble in WOBBLE[:count])


SOUND = AtRestFigures(
    requests=4300,
    before=REST,
    after=REST,
    burst=burst(*WOBBLE),
    first_m=1,
    first=speeds(1.0),
    last=speeds(1.01),
    baseline_burst=burst(*reversed(WOBBLE), requests=125),
    baseline_first=speeds(0.7)[::-1],
    baseline_last=speeds(0.71)[::-1],
)


def alone(figures: AtRestFigures) -> AtRestFigures:
    """The same without the baseline's server, as where servers take turns."""
    return replace(figures, baseline_burst=(), baseline_first=(), baseline_last=())


def test_a_server_that_lets_go_of_everything_passes():
    result = check_at_rest(SOUND)
    assert result.status == "pass"
    assert result.measured == "0 requests, KV 0.00% used, 0 bytes a request"


def test_requests_that_run_on_without_their_clients_fail():
    result = check_at_rest(replace(SOUND, after=replace(REST, running=3, waiting=1)))
    assert result.status == "fail"
    assert "3 requests run and 1 wait" in result.reason


def test_one_page_of_ten_thousand_that_is_never_freed_fails():
    result = check_at_rest(replace(SOUND, after=replace(REST, kv_cache_usage=1e-4)))
    assert result.status == "fail"
    assert "0.01% of the KV cache is in use, 0.00% before" in result.reason
    assert "never freed" in result.reason


def test_a_cache_that_held_as_much_before_passes():
    held = replace(REST, kv_cache_usage=0.25)
    assert check_at_rest(replace(SOUND, before=held, after=held)).status == "pass"


@pytest.mark.parametrize(("kept", "status"), [(MOST_BYTES_A_REQUEST / 2, "pass"), (4096, "fail")])
def test_memory_that_grows_with_every_request_fails(kept, status):
    result = check_at_rest(replace(SOUND, burst=burst(*WOBBLE, bytes_a_request=kept)))
    assert result.status == status
    assert ("memory grows by 4.0 KiB with every request" in result.reason) == (status == "fail")


def test_a_heap_that_grows_once_does_not_fail():
    """By 48 MiB in one part: twelve kilobytes a request, if all parts had grown so."""
    grown = tuple(
        replace(part, memory_bytes=(1 << 30) + (48 * MIB if index >= 3 else 0))
        for index, part in enumerate(SOUND.burst)
    )
    assert bytes_a_request(grown) == 0
    assert check_at_rest(replace(SOUND, burst=grown)).status == "pass"


def test_a_heap_that_fills_late_grows_no_more_in_further_parts():
    """Half a MiB in each of the first parts, which have few requests, as on a busy machine."""
    requests, further = 107, 4
    filling = burst(*WOBBLE, requests=requests, bytes_a_request=MIB / 2 / requests)
    assert shows_growth(filling)
    assert not shows_growth((*filling, *[filling[-1]] * further))
    leaking = burst(*WOBBLE, *WOBBLE[:further], requests=requests, bytes_a_request=MIB / 2 / requests)
    assert shows_growth(leaking)


def test_few_requests_of_a_slow_server_do_not_make_a_slope():
    few = burst(*WOBBLE, requests=4, bytes_a_request=16 * 1024)
    assert check_at_rest(replace(SOUND, burst=few)).status == "pass"


def test_a_failed_request_of_the_burst_fails_by_its_message():
    result = check_at_rest(replace(SOUND, errors=("HTTP 500: out of luck",)))
    assert (result.status, "HTTP 500: out of luck" in result.reason) == ("fail", True)


def test_a_server_that_tells_nothing_is_unknown():
    silent = Rest(None, None, None, None)
    parts = tuple(replace(part, memory_bytes=None) for part in SOUND.burst)
    result = check_at_rest(replace(SOUND, before=silent, after=silent, burst=parts))
    assert result.status == "unknown"
    assert result.reason == "the server does not tell requests, the KV cache in use, memory"
    partly = check_at_rest(replace(SOUND, burst=parts))
    assert partly.status == "pass"
    assert partly.reason == "nothing is left of the load; the server does not tell memory"


@pytest.mark.parametrize("figures", [SOUND, alone(SOUND)])
def test_a_server_as_fast_as_at_first_passes(figures):
    result = check_drift(figures)
    assert result.status == "pass", result.reason


@pytest.mark.parametrize("figures", [SOUND, alone(SOUND)])
@pytest.mark.parametrize("after", [2, 4, 6])
def test_a_step_after_so_many_requests_fails(figures, after):
    times = [wobble * (1.8 if index >= after else 1) for index, wobble in enumerate(WOBBLE)]
    result = check_drift(replace(figures, burst=burst(*times)))
    assert result.status == "fail"
    assert f"from about the {500 * after:,}th of the burst on" in result.reason


def test_a_burst_that_becomes_slower_little_by_little_fails():
    times = [wobble * (1 + 0.15 * index) for index, wobble in enumerate(WOBBLE)]
    assert check_drift(replace(SOUND, burst=burst(*times))).status == "fail"


def test_a_machine_that_becomes_slower_is_not_the_servers_fault():
    slowed = [wobble * (1.8 if index >= 4 else 1) for index, wobble in enumerate(WOBBLE)]
    both = replace(
        SOUND,
        burst=burst(*slowed),
        baseline_burst=burst(*slowed, requests=125),
        last=speeds(0.6),
        baseline_last=speeds(0.7 * 0.6)[::-1],
    )
    assert check_drift(both).status == "pass"
    assert check_drift(alone(both)).status == "fail", "and it is seen, where nothing tells"


def test_a_baseline_that_becomes_faster_does_not_make_the_artifact_slower():
    """Without contention for memory, a baseline in bfloat16 gains more than an artifact in INT4."""
    quickened = replace(SOUND, baseline_last=speeds(0.7 * 1.4)[::-1])
    assert check_drift(quickened).status == "pass"
    both = replace(quickened, last=speeds(0.8))
    assert check_drift(both).status == "fail", "the control: its own speed fell too"


def test_one_slow_part_is_the_machines():
    for slow in range(len(WOBBLE)):
        times = [wobble * (3 if index == slow else 1) for index, wobble in enumerate(WOBBLE)]
        assert check_drift(replace(SOUND, burst=burst(*times))).status == "pass"


def test_a_first_m_that_is_surely_slower_at_the_end_fails():
    result = check_drift(replace(SOUND, last=speeds(0.7)))
    assert result.status == "fail"
    assert "M=1 takes 1.4" in result.reason and "4,300 requests earlier" in result.reason


def test_a_first_m_that_may_be_slower_asks_for_a_quieter_machine():
    noisy = tuple(500 * factor for factor in (0.5, 0.95, 0.7, 1.0, 0.6, 0.8))
    result = check_drift(replace(SOUND, last=noisy))
    assert result.status == "inconclusive"
    assert "could be noise" in result.reason
    noisier = tuple(500 * factor for factor in (0.5, 1.1, 0.7, 1.2, 0.6, 0.9))
    assert check_drift(replace(SOUND, last=noisier)).status == "pass", "which says nothing of the server"


def test_one_disturbed_repeat_at_the_end_decides_nothing():
    last = (speeds(1.0)[0] / 5, *speeds(1.0)[1:])
    assert check_drift(replace(SOUND, last=last)).status == "pass"


def test_a_drift_is_unknown_where_nothing_was_measured():
    assert check_drift(replace(SOUND, burst=(), last=(), baseline_burst=())).status == "unknown"
