"""Whether tokenizer, chat template, end-of-sequence tokens and generation settings are the baseline's.

Quantizing changes none of them. What an artifact changes on purpose, its recipe declares under `changes`.
"""

from ..evidence.artifact_figures import TextFigures
from ..evidence.verdict import CheckResult

NAME = "tokenizer and templates"


def check_text_files(figures: TextFigures) -> CheckResult:
    """Fail for every part that differs and is not declared."""
    undeclared = [difference for difference in figures.differences if difference.part not in figures.declared]
    differing = list(dict.fromkeys(difference.part for difference in figures.differences))
    declared = [part for part in differing if part in figures.declared]
    if undeclared:
        named = "; ".join(f"{difference.part}: {difference.where}" for difference in undeclared)
        reason = (
            f"{named}. Copy the baseline's file; or, where this is meant, quantize by a recipe with "
            f"`changes: [{', '.join(dict.fromkeys(difference.part for difference in undeclared))}]`"
        )
    elif declared:
        reason = f"the recipe declares what differs: {', '.join(declared)}"
    else:
        reason = "all of them are the baseline's"
    return CheckResult(
        name=NAME,
        status="fail" if undeclared else "pass",
        measured=f"{', '.join(differing)} differ" if differing else "nothing differs",
        bound="the baseline's, but for what the recipe declares",
        reason=reason,
        figures={"differing_parts": len(differing), "declared_parts": len(declared)},
    )
