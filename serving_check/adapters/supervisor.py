"""Runs a command in its own process group and ends the whole group when standard input closes.

The parent holds the other end of standard input's pipe, so the group ends when the parent closes it, and also
when the parent is killed. The script is started by file path with the standard library alone: `supervisor.py
GRACE_SECONDS COMMAND...`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.1


def main(grace_seconds: float, command: list[str]) -> int:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stdout.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127
    while process.poll() is None:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_seconds)
            break
    end_group(process.pid)
    return process.wait()


def end_group(group: int) -> None:
    """Send SIGKILL to all processes left in the group: an engine's workers outlive a crashed engine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
