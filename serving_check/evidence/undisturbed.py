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
    """The numbers of the cores on which the processes may run."""
    threads: int | None
    """Number of computing threads in the process that uses the most CPU time; null if it is not known."""


@dataclass(frozen=True)
class AloneFigures:
    __pydantic_config__ = DOCUMENTED

    blocks: MeasuredM
    """Blocks at one M. In each repeat the processes of the other servers were stopped."""
    cores: int
    """Number of cores on which the servers may run."""
    on_cpu: bool
    """Whether the servers compute on these cores, rather than on GPUs."""
    gpu_use: float | None = None
    """The share of the time, 0 to 1, in which the GPUs were busy although no server had a request; null if it
    is not known, or on a CPU."""
    artifact_cores: ServerCores | None = None
    """The cores of the artifact's server; null if they are not known, or in older verdicts, which did not
    record them."""
    baseline_cores: ServerCores | None = None
