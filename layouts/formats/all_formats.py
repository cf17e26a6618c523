"""Every weight format; import `WEIGHT_FORMATS` from here. A new format is one file and one line in this
module.
"""

from . import fp8, int4, int8, iq2_xxs, mxfp4, mxfp8, nvfp4, unquantized  # noqa: F401 - registers them
from .weight_format import WEIGHT_FORMATS

__all__ = ["WEIGHT_FORMATS"]
