"""Measures each server with the others stopped, so that it shows how much an idle server takes from them.

An idle server should take nothing. A server that computes, or keeps a GPU busy, slows the measured one.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from ..adapters import Endpoint
from ..adapters.cpu_time import computing_threads, paused, usable_by
from ..adapters.gpu_use import gpu_use
from ..evidence.measurement import Block, MeasuredM
from ..evidence.undisturbed import AloneFigures, ServerCores
from ..statistics.decide import block_order
from .interleaving import SEEDS_PER_M, Servers, workload_spec

FIRST_SEED = 3 * SEEDS_PER_M // 4
"""The first seed of these prompts at an M: the seeds of blocks are far below it, the seeds of warm-ups
above."""
BLOCKS = 3
"""The least number of blocks that surely shows a slowdown of a third if repeats scatter by 4%."""
BLOCKS_ON_CPU = 2
"""The number of blocks on a CPU, where an idle server's CPU time decides; the least with a spread to show."""
IDLE_S = 1.2
"""Seconds after which the driver's last sampling period contains no request."""


def alone_figures(servers: Servers, gpus: Sequence[int]) -> AloneFigures | None:
    """Return blocks at the largest M with the other server stopped; None if a server cannot be stopped from
    here.

    gpus: the servers' GPUs; empty on a CPU
    """
    level = MeasuredM(max(servers.workload.ms))
    if not measure_alone(servers, level, BLOCKS if gpus else BLOCKS_ON_CPU):
        return None
    if gpus:
        time.sleep(IDLE_S)
    use, sides = gpu_use(gpus), (_cores_of(servers.artifact), _cores_of(servers.baseline))
    return AloneFigures(level, usable_cores(), not gpus, use, *sides)


def measure_alone(servers: Servers, alone: MeasuredM, blocks: int) -> bool:
    """Add blocks to `alone`; return false if a request failed, or a server cannot be stopped by this
    process.
    """
    endpoints = [servers.artifact, servers.baseline]
    endpoints += [] if servers.rival is None else [servers.rival.endpoint]
    for _ in range(blocks):
        index = len(alone.blocks)
        spec = workload_spec(servers.workload, alone.m, servers.text, FIRST_SEED + index)
        block = Block()
        for side in block_order(index):
            endpoint, repeats = {
                "A": (servers.artifact, block.artifact),
                "B": (servers.baseline, block.baseline),
            }[side]
            with contextlib.ExitStack() as stopped:
                if not all(_stop(other, stopped) for other in endpoints if other != endpoint):
                    return False
                repeats.append(servers.repeat(endpoint, spec))
        alone.blocks.append(block)
        if block.errors:
            return False
    return True


def _cores_of(server: Endpoint) -> ServerCores | None:
    processes = server.processes()
    cores = usable_by(processes)
    return ServerCores(tuple(sorted(cores)), computing_threads(processes)) if cores else None


def usable_cores() -> int:
    """Return the cores that this process and the servers that it starts may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stop(other: Endpoint, stopped: contextlib.ExitStack) -> bool:
    """Stop the other server until `stopped` closes; return false if its processes are not known."""
    processes = other.processes()
    stopped.enter_context(paused(processes))
    return bool(processes)
