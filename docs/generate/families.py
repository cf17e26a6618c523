"""The table of model families, from what `tests/bench/engine/families.py` recorded of each."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "tests" / "bench" / "results" / "engine" / "families.json"
MOST_REASON = 150
"""Characters of a refusal that are shown."""
SAME, OTHER = "same tokens", "other tokens"


def table(results: Path = RESULTS) -> str:
    families = json.loads(results.read_text(encoding="utf-8"))["families"]
    lines = ["| family | class | quantizes | serves the original | serves the INT4 | reason |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *(_row(name, found) for name, found in families.items())])


def _row(name: str, found: dict[str, str]) -> str:
    outcomes = [found.get(step, "") for step in ("quantize", "source", "artifact")]
    reasons = [outcome for outcome in outcomes if outcome.startswith(("refused", "loses", "fault"))]
    reasons += [found["ended"]] if "ended" in found else []
    reason = _reason(reasons[0]) if reasons else ""
    cells = [f"`{name}`", f"`{found['architecture']}`", *map(_word, outcomes), reason]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _word(outcome: str) -> str:
    """One or two words for an outcome."""
    if outcome in (SAME, "quantized"):
        return "yes"
    if outcome == OTHER:
        return "**other tokens**"
    if outcome.startswith("answers"):
        return "yes, not compared"
    if outcome.startswith(("refused", "fault")):
        return outcome.partition(":")[0]
    return "**incomplete**" if outcome else "–"


def _reason(outcome: str) -> str:
    """The first sentence of a refusal, as far as a cell can hold it."""
    words = outcome.partition(": ")[2] if outcome.startswith(("refused", "fault")) else outcome
    words = words.partition(": Unrecognized configuration class")[0]
    words = " ".join(words.split(". ")[0].split(";")[0].split()).replace("|", "/").replace("<", "&lt;")
    return words if len(words) <= MOST_REASON else words[:MOST_REASON].rpartition(" ")[0] + " …"
