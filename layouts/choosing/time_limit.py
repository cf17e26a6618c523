"""A time limit for third-party code, such as compilers and autotuners, that has none of its own.

The limit works in the main thread only, and only between two calls into C; in other threads the code runs to
its end.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """The exception of a time limit that was reached. The class is not an `Exception`, so a tuner that skips
    failing configurations lets it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside the `with` block after that many seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _out_of_time)
    others, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others:
            # Another alarm was set before: it must still go off at its time.
            remaining = others - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-6), interval)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
