"""Answers that are not as asked: the artifact's alone fail, those of both servers are not known."""

import pytest
from scalegate.serving_check.checks.in_use.as_asked import SEEDS, check_as_asked
from scalegate.serving_check.evidence.in_use import BlockInUse, FiguresInUse, SideInUse
from scalegate.serving_check.evidence.verdict import CheckResult

STOP = "stop: its stop string is in the text"
CHAT = "chat: usage says 31 prompt tokens, the chat template's has 35"


def judged(ours: list[str], theirs: list[str], unknown: tuple[str, ...] = ()) -> CheckResult:
    sides = (
        SideInUse(0.0, 4.0, 100, (0.1,) * 20, (0.01,) * 20, {}, not_as_asked=tuple(words))
        for words in (ours, theirs)
    )
    return check_as_asked(FiguresInUse((BlockInUse(20, *sides),), unknown=unknown))


def test_all_as_asked_passes():
    result = judged([], [])
    assert result.status == "pass" and result.measured == "0 of 20 answers are not as asked"


def test_what_the_artifacts_server_alone_does_fails_by_its_kind():
    result = judged([STOP, STOP, CHAT], [CHAT])
    assert result.status == "fail" and f"{STOP} (2×)" in result.reason
    assert "chat: the baseline's server does not answer as asked either" in result.reason
    assert result.measured.startswith("2 of 20")


@pytest.mark.parametrize(
    ("ours", "theirs", "status"), [(7, 4, "unknown"), (3, 1, "unknown"), (15, 2, "fail"), (1, 0, "fail")]
)
def test_what_the_engine_does_now_and_then_fails_only_if_the_artifacts_server_surely_does_it_more_often(
    ours, theirs, status
):
    assert judged([STOP] * ours, [STOP] * theirs).status == status


def test_many_deviations_of_one_kind_hide_no_other():
    ids = [f"id: one answer has '{index}', 'x'" for index in range(9)]
    result = judged([*ids, *[f"kind {index}: wrong" for index in range(7)], STOP, STOP], [])
    assert "id: one answer has '0', 'x' (9×)" in result.reason and f"{STOP} (2×)" in result.reason
    assert result.reason.endswith("and 3 kinds more")


def test_what_both_do_and_what_cannot_be_asked_is_unknown():
    assert judged([CHAT], [CHAT]).status == "unknown"
    result = judged([], [], ("it takes no logit_bias",))
    assert result.status == "unknown" and "logit_bias" in result.reason


def test_the_baselines_faults_alone_say_nothing_of_the_artifact():
    assert judged([], [STOP]).status == "pass"


def test_no_finished_block_is_inconclusive():
    assert check_as_asked(FiguresInUse((BlockInUse(20, None, None),))).status == "inconclusive"


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        ((False, False, False), (True, True, True), "fail"),
        ((False, True, False), (True, True, True), "pass"),
        ((False,), (True,), "pass"),
        ((False, False), (False, False), "unknown"),
        ((), (), "pass"),
    ],
)
def test_a_seed_that_never_gives_the_same_answer_is_ignored(ours, theirs, status):
    sides = [SideInUse(0.0, 4.0, 100, (0.1,), (0.01,), {}, seeds_kept=kept) for kept in (ours, theirs)]
    result = check_as_asked(FiguresInUse((BlockInUse(1, *sides),)))
    assert result.status == status
    assert status != "fail" or f"{SEEDS} (3×)" in result.reason
