"""The number of cores that this process may use, and the number of threads for a model.

Nothing here imports torch: the number has to be known before OpenMP is loaded.
"""

import os

import psutil


def available_cores() -> int:
    """Return the number of cores that this process may run on, by its affinity mask, which `taskset` can
    set.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_threads() -> int:
    """Return the threads for a model: a core is left to the HTTP side of a server and to its clients.

    There are never more threads than physical cores. On two cores one thread decodes as fast as two (263
    against 282 tok/s with the bundled model at M=1, 1901 against 2446 at M=16), and faster if something else
    runs (1864 against 665 at M=16): a step with two threads waits for the slower of two cores.
    """
    return max(1, min(_physical_cores(), available_cores() - 1))


def threads_alone() -> int:
    """Return the threads for a model while no server runs, and no client."""
    return min(_physical_cores(), available_cores())


def _physical_cores() -> int:
    return psutil.cpu_count(logical=False) or available_cores()
