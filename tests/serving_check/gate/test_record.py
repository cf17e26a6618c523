"""A verdict read back is judged again: what was edited in it contradicts its own raw figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.gate.record import contradictions, parse_verdict
from scalegate.serving_check.settings import WorkloadSettings

from ...verdict_files import read_verdict
from ..gate_samples import sample_verdict

DRAWING = WorkloadSettings((1, 8), seed=3, draws_between=True)
PASSED = {1: 1.0, 8: 1.2}
FAILED = {1: 1.0, 8: 0.4}


def edited(tmp_path: Path, ratios: dict[int, float], edit: Any) -> Path:
    value = json.loads(json.dumps(sample_verdict(ratios).to_json()))
    edit(value)
    path = tmp_path / "serving_check.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def say_pass_everywhere(value: dict) -> None:
    value["status"] = "pass"
    for part in (*value["checks"], *value["curve"]):
        part["status"] = "pass" if part["status"] != "unknown" else "unknown"


def check_of(value: dict, name: str) -> dict:
    return next(check for check in value["checks"] if check["name"] == name)


def drop_what_failed(value: dict) -> None:
    value["status"] = "pass"
    value["checks"] = [check for check in value["checks"] if check["status"] in ("pass", "unknown")]


def drop_the_slow_m(value: dict) -> None:
    value["evidence"]["measured"].pop()


def slow_the_baseline(value: dict) -> None:
    for block in value["evidence"]["measured"][-1]["blocks"]:
        for repeat in block["baseline"]:
            repeat["duration"] *= 4


def send_less(value: dict) -> None:
    value["evidence"]["measured"][-1]["blocks"][0]["baseline"][0]["requests"] = 4


def loosen_the_bound(value: dict) -> None:
    value["bounds"]["throughput_floor"] = 0.1


@pytest.mark.parametrize(
    ("ratios", "edit", "words"),
    [
        (FAILED, lambda value: value.update(status="pass"), "it says pass, its figures say fail"),
        (FAILED, say_pass_everywhere, "throughput says pass, its figures say fail"),
        (FAILED, drop_what_failed, "its checks are not the gate's: latency, throughput"),
        (FAILED, drop_the_slow_m, "at other Ms than its workload asks for"),
        (FAILED, slow_the_baseline, "the curve at M=8 is not the one of its repeats"),
        (FAILED, loosen_the_bound, "throughput says fail, its figures say pass"),
        (PASSED, lambda value: value["curve"][0].update(ratio=9.0), "the curve at M=1"),
        (PASSED, lambda value: value["curve"].pop(), "the curve has 1 points"),
        (
            PASSED,
            lambda value: check_of(value, "throughput").update(measured="lowest 9"),
            "the words of throughput",
        ),
        (
            PASSED,
            lambda value: check_of(value, "quality")["figures"].update(mean_kl=0.0),
            "the figures of quality",
        ),
        (PASSED, lambda value: value.update(quality_tokens=10**6), "another number of tokens"),
        (PASSED, send_less, "the repeats at M=8 do not match its workload"),
        (PASSED, lambda value: value["workload"].update(output_len=256), "do not match its workload"),
        (PASSED, lambda value: value["evidence"]["measured"][0]["blocks"].clear(), "not measured completely"),
    ],
)
def test_an_edit_is_told_by_what_it_contradicts(tmp_path: Path, ratios, edit, words: str):
    assert words in "; ".join(contradictions(parse_verdict(edited(tmp_path, ratios, edit))))


@pytest.mark.parametrize("ratios", [PASSED, FAILED, {1: 0.95, 2: 0.93}])
def test_the_control_an_unedited_verdict_follows_from_its_figures(tmp_path: Path, ratios):
    verdict = read_verdict(edited(tmp_path, ratios, lambda value: None))
    assert verdict == sample_verdict(ratios)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda value: value["bounds"].update(max_mean_kl="nan"), "max_mean_kl must be a number"),
        (lambda value: value["bounds"].update(throughput_floor=-1), "throughput_floor must be a number"),
        (lambda value: value["workload"].update(ms=[]), "m is .* it must be distinct whole numbers"),
        (lambda value: value["evidence"].pop("weights"), "evidence.weights"),
        (lambda value: value["evidence"]["measured"][0].update(m="many"), "evidence.measured.0.m"),
    ],
)
def test_bounds_and_figures_that_are_none_are_refused(tmp_path: Path, edit, words: str):
    with pytest.raises(UserError, match=words):
        parse_verdict(edited(tmp_path, PASSED, edit))


def drop_a_drawn_m(value: dict) -> None:
    value["evidence"]["measured"].pop(1)


def draw_from_another_seed(value: dict) -> None:
    value["workload"]["seed"] += 1


def call_a_drawn_m_given(value: dict) -> None:
    """Then all that is given was decided with confidence, and nothing was drawn."""
    value["workload"].update(ms=[level["m"] for level in value["evidence"]["measured"]], draws_between=False)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda value: None, ""),
        (drop_a_drawn_m, "at other Ms than its workload asks for, or its seed draws"),
        (draw_from_another_seed, "at other Ms than its workload asks for, or its seed draws"),
        (
            lambda value: value["workload"].update(draws_between=False),
            "at other Ms than its workload asks for",
        ),
        (call_a_drawn_m_given, "do not match its workload"),
        (
            lambda value: value["curve"][1].update(drawn=False),
            "the curve at M=2 is not the one of its repeats",
        ),
    ],
)
def test_the_measured_ms_are_those_that_the_seed_draws(tmp_path: Path, edit, words: str):
    value = json.loads(json.dumps(sample_verdict(PASSED, workload=DRAWING).to_json()))
    assert [point["drawn"] for point in value["curve"]] == [False, True, True, True, False]
    edit(value)
    path = tmp_path / "serving_check.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    found = "; ".join(contradictions(parse_verdict(path)))
    assert words in found and bool(words) == bool(found)


def test_figures_that_are_not_finite_survive_the_file(tmp_path: Path):
    def spoil(value: dict) -> None:
        value["evidence"]["quality"]["mean_kl"] = "nan"

    found = contradictions(parse_verdict(edited(tmp_path, PASSED, spoil)))
    assert "quality says pass, its figures say fail" in found


def test_another_versions_words_may_differ_and_are_given_anew():
    verdict = sample_verdict(PASSED)
    verdict.environment.versions["scalegate"] = "0.0.1"
    object.__setattr__(verdict.checks[0], "reason", "as an older version said it")
    assert contradictions(verdict) == []
    object.__setattr__(verdict.checks[0], "status", "fail")
    assert contradictions(verdict) == ["loads says fail, its figures say pass"]
