"""Which calibration text a job reads: a given text, the recipe's, or the model's own."""

from ....layouts.kv.format import KV_FORMATS, largest_of
from ...records.recipe import Recipe
from .calibration_names import SELF
from .calibration_needs import CalibrationNeeds


def text_source(
    recipe: Recipe, needs: CalibrationNeeds, for_kv_scales: bool, given: str | None
) -> str | None:
    """Return the text to read; None if nothing uses a text, or nothing needs one and none was given.

    for_kv_scales: whether the KV format takes scales, which a text improves
    given:         the text that the user named
    """
    named = given or recipe.calibration or None
    if not needs and not for_kv_scales:
        return None
    return named or (SELF if needs.largest or needs.solved else None)


def budget_source(recipe: Recipe, given: str | None) -> str:
    """Return the text on which formats are compared under a budget."""
    return given or recipe.calibration or SELF


def kv_description(kv_format: str, text: str | None) -> str:
    """Return a description of the KV format, and of the text that its scales come from, if it has scales.

    text: the name of the text that is read; None if none is
    """
    if largest_of(KV_FORMATS[kv_format]) is None:
        return kv_format
    if text is None:
        return f"{kv_format}, unscaled; give --calibration TEXT or self"
    return f"{kv_format}, with scales found on {'what the model writes itself' if text == SELF else text}"
