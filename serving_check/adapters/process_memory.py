"""How much memory the processes of a server hold, as Linux counts it. Not for GPU memory."""

import os
from pathlib import Path

import psutil


def resident_bytes(pid: int) -> int | None:
    """Return the resident bytes of one process; None if it has ended, or if this is not Linux."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes_of_tree(pid: int) -> int | None:
    """Return the resident bytes of a process and all its descendants; None if it has ended.

    Pages that two processes share count twice: these figures are compared with each other, and not with the
    machine's memory.
    """
    own = resident_bytes(pid)
    if own is None:
        return None
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return None
    return own + sum(resident_bytes(process.pid) or 0 for process in descendants)
