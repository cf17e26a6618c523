"""Every faulty server is caught by the real gate, by the check that names the cause; a sound one passes."""

from dataclasses import replace

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.checks.in_use.at_rest import NAME as AT_REST
from scalegate.serving_check.checks.in_use.drift import NAME as DRIFT
from scalegate.serving_check.checks.in_use.speed import NAME as SPEED_IN_USE
from scalegate.serving_check.checks.part_throughput import DECODING as DECODE_THROUGHPUT
from scalegate.serving_check.checks.part_throughput import PROMPTS as PROMPT_THROUGHPUT
from scalegate.serving_check.checks.throughput import NAME as THROUGHPUT
from scalegate.serving_check.gate import at_rest, in_use
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS
from scalegate.tests.exhaustive import exhaustive_but

from .all_server_faults import FAULTS
from .both_servers import (
    IN_USE,
    LONG_PROMPTS,
    SHORT_WORKLOAD,
    WORKLOAD,
    Zoo,
    is_named,
    judged_with,
    measured,
    not_passed,
)
from .server_fault import TOGETHER

pytestmark = pytest.mark.alone
HIDDEN = [name for name, fault in FAULTS.items() if fault.in_use and fault.profile is None]
TAKE_LONGER = {THROUGHPUT, DECODE_THROUGHPUT, PROMPT_THROUGHPUT, SPEED_IN_USE, AT_REST, DRIFT}
"""Checks that a load of a few seconds cannot decide."""
NAMED_TOGETHER = (
    "pages_never_freed_after_an_abort",
    "memory_kept_of_every_request",
    "garbage_in_long_contexts",
    "garbage_when_sampled",
    "stop_strings_ignored",
    "log_probabilities_in_bits",
)
"""Each of another check, and none so slow that measuring ends before the others show."""

NAMED_AT_ONCE = ("kernel_compiled_every_step", "crossed_answers", "half_the_answer", "not_streamed")
NAMED_LATER = ("capped_with_waiting_requests", "response_cache")
"""Quick faults of different checks, of which none hides another. The others change how long all takes."""
SHOWN_BY_FEW_BLOCKS = "ten_times_slower"
"""The quick fault that `make test` has by itself."""
MOST_VERDICTS = 3
"""How often a busy machine is asked, as the gate advises where noise left a verdict open."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        runs = range(metafunc.config.getoption("--zoo-runs"))
        each = metafunc.config.getoption("--zoo-in-use")
        chosen = [name for name, fault in FAULTS.items() if each or fault.profile or not fault.in_use]
        cases = [(name, run) for run in runs for name in chosen]
        kept = [(SHOWN_BY_FEW_BLOCKS, run) for run in runs]
        metafunc.parametrize(
            ("fault", "run"), exhaustive_but(cases, *kept), ids=[f"{name}-{run}" for name, run in cases]
        )


def test_a_sound_server_passes_a_short_load_with_requests_of_every_kind(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
):
    for module, name, short in [
        (in_use, "BLOCKS", 1),
        (in_use, "LEAST_SECONDS", 0.3),
        (in_use, "LEAST_REQUESTS", 1),
        (at_rest, "FIRST_REQUESTS", 20),
        (at_rest, "MOST_IN_A_PART", 20),
        (at_rest, "SEEN_REQUESTS", 0),
        (at_rest, "LAST_S", 0.0),
    ]:
        monkeypatch.setattr(module, name, short)
    judgement = zoo.judged(workload=replace(SHORT_WORKLOAD, max_blocks=LOOKS[0]), in_use=True)
    assert not_passed(judgement).keys() <= TAKE_LONGER, not_passed(judgement)
    assert {check.name for check in judgement.checks} >= {FAULTS[name].check for name in HIDDEN}


@pytest.mark.exhaustive
def test_a_sound_server_passes(zoo: Zoo):
    workload = replace(IN_USE, max_blocks=WorkloadSettings.max_blocks)
    for _ in range(MOST_VERDICTS):
        judgement = zoo.judged(workload=workload, in_use=True)
        if judgement.status != "inconclusive":
            break
    assert judgement.status == "pass", not_passed(judgement)
    assert {check.name for check in judgement.checks} >= {FAULTS[name].check for name in HIDDEN}


@pytest.mark.exhaustive
def test_decoding_of_a_sound_server_keeps_up_after_long_prompts(zoo: Zoo):
    """A CPU may read prompts faster in bfloat16 than in INT4, which is not what is asked here."""
    judgement = zoo.judged(workload=LONG_PROMPTS)
    assert next(check.status for check in judgement.checks if check.name == DECODE_THROUGHPUT) == "pass", (
        not_passed(judgement)
    )


def test_a_faulty_server_is_caught_by_name(zoo: Zoo, fault: str, run: int):
    injected = FAULTS[fault]
    judgement = judged_with(zoo, injected, run)
    caught = not_passed(judgement)
    print(f"{fault}, run {run}: {judgement.status}, {measured(judgement, injected.check)}, {caught}")
    assert judgement.status == "fail", caught
    assert is_named(injected, judgement), caught


@pytest.mark.parametrize(
    "names", [NAMED_AT_ONCE, pytest.param(NAMED_LATER, marks=pytest.mark.exhaustive)], ids=TOGETHER.join
)
def test_quick_faults_that_are_on_together_are_named_each_by_its_check(zoo: Zoo, names: tuple[str, ...]):
    judgement = zoo.judged(TOGETHER.join(names), workload=SHORT_WORKLOAD)
    assert judgement.status == "fail"
    for name in names:
        assert is_named(FAULTS[name], judgement), (name, not_passed(judgement))


@pytest.mark.exhaustive
def test_faults_that_are_on_together_are_named_each_by_its_check(zoo: Zoo):
    judgement = zoo.judged(TOGETHER.join(NAMED_TOGETHER), workload=IN_USE, in_use=True)
    for name in NAMED_TOGETHER:
        assert is_named(FAULTS[name], judgement), (name, not_passed(judgement))


@pytest.mark.exhaustive
def test_all_that_a_load_of_equal_requests_hides_fails_at_once(zoo: Zoo):
    judgement = zoo.judged(TOGETHER.join(HIDDEN), workload=IN_USE, in_use=True)
    print(f"all at once: {judgement.status}, {not_passed(judgement)}")
    assert judgement.status == "fail"


@pytest.mark.exhaustive
def test_the_baseline_in_the_artifacts_place_is_caught(zoo: Zoo, another_baseline: Endpoint):
    # So many tokens that those which the two models choose differently tell which of them was served.
    few = replace(WORKLOAD, output_len=128, max_blocks=LOOKS[0])
    caught = not_passed(zoo.judged(artifact=another_baseline, workload=few))
    assert "the artifact's server serves the baseline" in caught["served text"]
    assert "packed its layers as none" in caught["loads"]


def test_one_server_behind_both_urls_is_refused(zoo: Zoo):
    with pytest.raises(UserError, match="are the same server"):
        zoo.judged(artifact=zoo.baseline)
