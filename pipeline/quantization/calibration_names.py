"""The names under which commands, recipes and manifests speak of a calibration text.

Apart from what reads such a text, which takes seconds to import: cards and previews need the names alone.
"""

from ..recipe import SELF

__all__ = ["CALIBRATION", "LEARNED", "SELF"]

CALIBRATION = "calibration"
"""In a manifest's `quantization`: how many sequences were read of each kind, and whether the text fits."""
LEARNED = "layer_error"
"""In the same place: each layer's error before and after its rounding was learned, where it was."""
