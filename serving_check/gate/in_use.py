"""Sends both servers a load as in use: blocks of the same requests at the same times, one server after the other.

The baseline's curve says how many requests a second lead from one at a time to more than the largest M.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..adapters import Endpoint
from ..evidence.in_use import BlockInUse, SideInUse
from ..evidence.measurement import MeasuredM
from ..settings import WorkloadSettings
from ..workload.open_loop import OpenLoopResult, run_open_loop
from ..workload.use_plan import PlannedRequest
from .repeats import deadline_from

BLOCKS = 3
"""On either side: a throughput ratio needs more than two for limits that can fail."""
