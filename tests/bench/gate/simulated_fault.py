"""A fault of one kind and size, as a simulation puts it into what a sound run recorded."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from scalegate.serving_check.evidence.verdict import Verdict


@dataclass(frozen=True)
class SimulatedFault:
    name: str
    check: str
    """Which is for it; empty for no fault."""
    statuses: Callable[[Verdict, random.Random], dict[str, str]]
    """Of the checks that see it, by name, in one simulated run after a recorded one."""
