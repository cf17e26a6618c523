"""The CPU time of this machine's cores: how much was used, and how much a hypervisor took.

The figures come from Linux's `/proc/stat`; on other systems they are not known. The CPU time of single
processes is in `cpu_time.py`.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
USER, NICE, SYSTEM, IDLE, IO_WAIT, INTERRUPTS, SOFT_INTERRUPTS, STEAL = range(8)
"""proc_stat(5): the columns of a core's line. Guests' time is in USER and NICE already."""


@dataclass(frozen=True)
class CoresTime:
    """The CPU seconds since the machine started, summed over its cores."""

    busy: float
    """Seconds in which some process ran."""
    stolen: float
    """Seconds in which a process was ready to run, but the hypervisor gave the core to another machine."""

    def since(self, before: "CoresTime") -> "CoresTime":
        return CoresTime(self.busy - before.busy, self.stolen - before.stolen)


def cores_time(cores: Collection[int]) -> CoresTime | None:
    """Return the CPU time of the cores with the given numbers; None if it is not known."""
    try:
        lines = STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    busy, stolen, seen = 0, 0, set()
    for line in lines:
        name, *columns = line.split() or [""]
        number = name.removeprefix("cpu")
        if name != number and number.isdigit() and int(number) in cores:
            ticks = [int(column) for column in columns]
            seen.add(int(number))
            busy += sum(ticks[column] for column in (USER, NICE, SYSTEM, INTERRUPTS, SOFT_INTERRUPTS))
            stolen += ticks[STEAL]
    if seen != set(cores):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return CoresTime(busy / second, stolen / second)
