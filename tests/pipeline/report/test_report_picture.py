"""The README's picture: drawn from two recorded verdicts on the same files, one failed and one passed."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.record import judged_again, parse_verdict

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    paths = [FOLDER / f"report-{name}-layout.json" for name in ("slow", "chosen")]
    return [judged_again(parse_verdict(path)) for path in paths]


def test_the_picture_is_of_one_artifact_in_two_layouts(verdicts: list[Verdict]):
    slow, chosen = verdicts
    assert (slow.status, chosen.status) == ("fail", "pass")
    assert slow.artifact.weights_sha256 == chosen.artifact.weights_sha256
    assert slow.artifact.layouts.keys().isdisjoint(chosen.artifact.layouts)
    assert slow.bounds == chosen.bounds and slow.environment.device == chosen.environment.device


def test_the_picture_is_what_its_script_draws_from_them(verdicts: list[Verdict]):
    drawn = runpy.run_path(str(FOLDER / "make_report_picture.py"))["draw"](*verdicts)
    assert drawn == (FOLDER / "report.svg").read_text(encoding="utf-8")
    words = " ".join(ElementTree.fromstring(drawn).itertext())
    assert "FAIL" in words and "PASS" in words and "falls behind" in words and "keeps up" in words
