"""Every quantizer; import `QUANTIZERS` from here. A new one is one file and one line here."""

from . import int4_quantizer  # noqa: F401 - registers it
from .quantizer import QUANTIZERS

__all__ = ["QUANTIZERS"]
