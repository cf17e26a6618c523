"""Verdicts that tests read back from their files."""

from pathlib import Path

from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.record import contradictions, judged_again, parse_verdict


def read_verdict(path: Path) -> Verdict:
    """The verdict in `path`, which follows from its own figures."""
    verdict = parse_verdict(path)
    assert contradictions(verdict) == []
    return judged_again(verdict)
