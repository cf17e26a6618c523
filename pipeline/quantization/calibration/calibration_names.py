"""The names under which commands, recipes and manifests speak of a calibration text.

The names have a file of their own because the code that reads a calibration text takes seconds to import, and
cards and previews need only the names.
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
