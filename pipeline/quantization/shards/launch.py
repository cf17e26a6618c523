"""Starts a quantize job with one process per device, as torchrun would, and ends all processes when one has
failed.

The processes find one another through torchrun's environment (`ranks.py`); this process holds their store, so
none of them outlives it. Several machines need torchrun itself.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed import TCPStore

from ....base.errors import UserError
from ....base.log import logger
from ...machine.cores import available_cores
from .ranks import FAULT, GO_ON

HOST = "127.0.0.1"
PIPELINE = (sys.executable, "-P", "-m", "scalegate.pipeline")
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""How many seconds the other processes have to end by themselves after one has failed."""


def devices_of(words: str) -> list[str]:
    """Return torch's names of `all`, of GPUs by number (`0,1`) or of torch's names (`cuda:0,cuda:1`,
    `cpu,cpu`).
    """
    if words == "all":
        count = torch.cuda.device_count()
        if not count:
            raise UserError(
                "--devices all: PyTorch finds no GPU here; give --devices cpu,cpu for two processes"
            )
        return [f"cuda:{index}" for index in range(count)]
    names = [f"cuda:{word}" if word.isdigit() else word for word in words.split(",")]
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UserError(f"--devices {words}: {name!r} is not a device; give all, or 0,1") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"--devices {words}: PyTorch finds {torch.cuda.device_count()} GPUs here")
    return names


def run_on(devices: Sequence[str], words: Sequence[str], silent: bool = False) -> int:
    """Run `pipeline WORDS --device DEVICE` on each device; return the first exit status that is not 0, or 0.

    silent: without its summary on stdout
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(max(1, available_cores() // len(devices))),
    }
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for rank, device in enumerate(devices):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes[f"process {rank} on {device}"] = subprocess.Popen(
                [*PIPELINE, *words, "--device", device],
                env=os.environ | common | own,
                stdout=subprocess.DEVNULL if silent else None,
            )
        return _first_failure(processes)
    finally:
        _end(list(processes.values()))


def _first_failure(processes: dict[str, subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = {name: process.poll() for name, process in processes.items()}
        killed = [name for name, status in statuses.items() if status is not None and status < 0]
        for name in killed:
            by = signal.Signals(-(statuses[name] or 0)).name
            logger.error(f"{name} was ended by {by}; {GO_ON}")
            return FAULT
        if failed := [status for status in statuses.values() if status]:
            return failed[0]
        if all(status == 0 for status in statuses.values()):
            return 0
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all processes. Processes that know of a failure end by themselves, and the others are stopped."""
    deadline = time.monotonic() + GRACE_SECONDS
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for process in processes:
            if process.poll() is None:
                end(process)
        deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.wait()
