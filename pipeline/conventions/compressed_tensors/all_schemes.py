"""Every scheme; import `SCHEMES` from here. A new scheme is one file and one line in this module."""

from . import (  # noqa: F401 - registers them
    float_quantized,
    int_quantized,
    mxfp4_pack_quantized,
    mxfp8_quantized,
    nvfp4_pack_quantized,
    pack_quantized,
    pack_quantized_int8,
)
from .scheme import SCHEMES

__all__ = ["SCHEMES"]
