"""One recorded run gives the very verdict that it gave: `judge` once made these words and figures of it.

The run is of the bundled checkpoint at 4 bits on a busy machine, beside a rival and with batch invariance
claimed, so some checks pass, some fail and one is inconclusive. Whoever changes a check's words or figures on
purpose rewrites the judgement in the same commit, with
`python -m scalegate.tests.serving_check.gate.test_recorded`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.record import judged_again

from ..gate_samples import sample_verdict

EVIDENCE = Path(__file__).with_name("recorded_evidence.json")
JUDGEMENT = Path(__file__).with_name("recorded_judgement.json")
FOLLOWS = ("status", "checks", "curve")


def recorded() -> dict[str, Any]:
    return json.loads(EVIDENCE.read_text(encoding="utf-8"))


def judgement(given: dict[str, Any]) -> bytes:
    """What follows from evidence, workload and bounds, as a verdict's file has it."""
    verdict = judged_again(Verdict.from_json(sample_verdict({1: 1.0}).to_json() | given)).to_json()
    follows = {name: verdict[name] for name in FOLLOWS}
    return (json.dumps(follows, indent=2, ensure_ascii=False) + "\n").encode()


def test_the_recorded_evidence_gives_the_very_verdict_that_it_gave():
    assert judgement(recorded()) == JUDGEMENT.read_bytes()


def slow_a_repeat(given: dict[str, Any]) -> None:
    given["evidence"]["measured"][0]["blocks"][0]["baseline"][0]["duration"] *= 1.000001


def tighten_a_bound(given: dict[str, Any]) -> None:
    given["bounds"]["max_mean_kl"] /= 2


def ask_for_shorter_answers(given: dict[str, Any]) -> None:
    given["workload"]["output_len"] -= 1


@pytest.mark.parametrize("edit", [slow_a_repeat, tighten_a_bound, ask_for_shorter_answers])
def test_the_control_another_figure_gives_another_verdict(edit):
    given = recorded()
    edit(given)
    assert judgement(given) != JUDGEMENT.read_bytes()


if __name__ == "__main__":
    JUDGEMENT.write_bytes(judgement(recorded()))
