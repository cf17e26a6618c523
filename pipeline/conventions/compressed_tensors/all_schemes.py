"""Every scheme; import `SCHEMES` from here. A new one is one file and one line here."""

from . import nvfp4_pack_quantized, pack_quantized, pack_quantized_int8  # noqa: F401 - registers them
from .scheme import SCHEMES

__all__ = ["SCHEMES"]
