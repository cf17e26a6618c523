"""Each server measured while the other one is stopped: raw figures that show whether an idle server takes
anything.

Data only. `gate/alone.py` measures, `checks/undisturbed.py` judges.
"""

from dataclasses import dataclass

from ..settings import DOCUMENTED
from .measurement import MeasuredM


@dataclass(frozen=True)
class ServerCores:
    """The cores or devices on which a server's processes run."""

    __pydantic_config__ = DOCUMENTED

    cores: tuple[int, ...]
    """By number, those that they may run on."""
    threads: int | None
    """That compute, in the process that uses most CPU time; null if it is not known."""


@dataclass(frozen=True)
class AloneFigures:
    __pydantic_config__ = DOCUMENTED

    blocks: MeasuredM
    """Blocks at one M. In each repeat the processes of the other servers were stopped."""
    cores: int
    """That the servers may run on."""
    on_cpu: bool
    """Whether they compute on these cores, rather than on GPUs."""
    gpu_use: float | None = None
    """Share of the time in which the GPUs were busy while no server had a request, 0 to 1; null if nothing
    tells, or on a CPU."""
    artifact_cores: ServerCores | None = None
    """Null if they are not known, or in verdicts from before they were recorded."""
    baseline_cores: ServerCores | None = None
