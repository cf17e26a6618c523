"""What the processes of `test_fork_server.py` run: a fork, like a spawned process, imports it by name."""

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from scalegate.serving_check.server.fork_server import start_process


def tell(connection: Connection, word: str) -> None:
    """Where this process comes from and what surrounds it; `word` goes to standard output too."""
    print(word)
    surroundings: dict[str, Any] = {"folder": os.getcwd(), "mark": os.environ.get("MARK")}
    connection.send({**surroundings, "parent": os.getppid(), "pid": os.getpid(), "word": word})


def wait_for_ever(connection: Connection) -> None:
    """In a system call that no end of a pipe interrupts."""
    connection.send(os.getpid())
    time.sleep(3600)


def leave(connection: Connection, status: int) -> None:
    """End in the middle of it, as a crash does."""
    os._exit(status)


if __name__ == "__main__":
    # What is pickled has to be named by its module, which this process runs under another name.
    from scalegate.tests.serving_check.server import forked_mains

    if sys.argv[1] == "tell":
        connection, _ = start_process(forked_mains.tell, "said by the fork", name="tells")
    else:
        connection, _ = start_process(forked_mains.wait_for_ever, name="waits")
    print(connection.recv(), flush=True)
    sys.stdin.read()
