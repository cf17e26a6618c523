"""The parts of a job: timed, and said in lines that need no terminal."""

import pytest
from scalegate.base.stage_clock import StageClock, in_words


def test_each_part_is_timed_and_said(capsys):
    clock = StageClock()
    with clock.stage("quality"):
        clock.say("half way")
    with clock.stage("quality"):
        pass
    assert list(clock.seconds) == ["quality"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["half way", "quality: 0.0 s", "quality: 0.0 s"]


def test_a_part_that_fails_has_no_time(capsys):
    clock = StageClock()
    with pytest.raises(ValueError), clock.stage("quality"):
        raise ValueError
    assert not clock.seconds and not capsys.readouterr().err


def test_without_progress_it_times_and_says_nothing(capsys):
    clock = StageClock(shown=False)
    with clock.stage("quality"):
        pass
    assert "quality" in clock.seconds and not capsys.readouterr().err


def test_times_are_rounded_as_people_say_them():
    assert [in_words(seconds) for seconds in (0.2, 40.4, 99, 260)] == ["1 s", "40 s", "99 s", "4 min"]
