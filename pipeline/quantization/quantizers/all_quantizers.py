"""Every quantizer; import `QUANTIZERS` from here. A new quantizer is one file and one line in this module."""

from . import (  # noqa: F401 - registers them
    fp8_quantizer,
    int4_quantizer,
    int8_quantizer,
    iq2_xxs_quantizer,
    mxfp4_quantizer,
    mxfp8_quantizer,
    nvfp4_quantizer,
)
from .quantizer import QUANTIZERS

__all__ = ["QUANTIZERS"]
