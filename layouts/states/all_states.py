"""The registry of state formats."""

from typing import Any

from ...base.registry import Registry
from .gated_delta_rule import GatedDeltaRule
from .last_inputs import InputWindow
from .linear_recurrence import LinearRecurrence
from .mamba1 import Mamba1
from .mamba2 import Mamba2
from .short_convolution import ShortConvolution

STATE_FORMATS: Registry[Any] = Registry("state format")
STATE_FORMATS.add("short_convolution", ShortConvolution())
STATE_FORMATS.add("last_inputs", InputWindow())
STATE_FORMATS.add("gated_delta_rule", GatedDeltaRule())
STATE_FORMATS.add("mamba2", Mamba2())
STATE_FORMATS.add("mamba1", Mamba1())
STATE_FORMATS.add("linear_recurrence", LinearRecurrence())
