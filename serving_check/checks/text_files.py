"""Whether tokenizer, chat template, end-of-sequence tokens and generation settings are the baseline's.

Quantization changes neither tokenizer nor templates nor settings. If an artifact changes a part on purpose,
its recipe declares this under `changes`.
"""

from ..evidence.artifact_figures import TextFigures
from ..evidence.verdict import CheckResult

NAME = "tokenizer and templates"


def check_text_files(figures: TextFigures) -> CheckResult:
    """Fail if a part differs from the baseline's and the recipe does not declare it."""
    undeclared = [difference for difference in figures.differences if difference.part not in figures.declared]
    differing = list(dict.fromkeys(difference.part for difference in figures.differences))
    declared = [part for part in differing if part in figures.declared]
    if undeclared:
        named = "; ".join(f"{difference.part}: {difference.where}" for difference in undeclared)
        reason = (
            f"{named}. Copy the baseline's file; if the change is intended, quantize with a recipe that "
            f"has `changes: [{', '.join(dict.fromkeys(difference.part for difference in undeclared))}]`"
        )
    elif declared:
        reason = f"the recipe declares what differs: {', '.join(declared)}"
    else:
        reason = "all of them match the baseline's"
    return CheckResult(
        name=NAME,
        status="fail" if undeclared else "pass",
        measured=f"{', '.join(differing)} differ" if differing else "nothing differs",
        bound="the same as the baseline's, except for what the recipe declares",
        reason=reason,
        figures={"differing_parts": len(differing), "declared_parts": len(declared)},
    )
