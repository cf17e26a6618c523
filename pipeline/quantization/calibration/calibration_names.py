"""The names under which commands, recipes and manifests speak of a calibration text.

These names are separate from the code that reads such a text, which takes seconds to import: cards and
previews need only the names.
"""

from ...records.recipe import SELF

__all__ = ["CALIBRATION", "LEARNED", "SCARCE", "SELF"]

CALIBRATION = "calibration"
"""In a manifest's `quantization`: how many sequences were read of each kind, and whether the text fits."""
LEARNED = "layer_error"
"""In the same place: each layer's error before and after its rounding was learned, if the recipe asks for it;
empty if the text was too short."""
SCARCE = "experts_with_few_tokens"
"""In the same place: experts that were reached by fewer tokens than they have inputs, if there are any."""
