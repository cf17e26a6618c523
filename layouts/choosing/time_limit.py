"""A limit on how long other people's code may run: compilers and autotuners that have none of their own.

Only the main thread can be interrupted, between two calls into C; elsewhere the code runs to its end.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """Not an `Exception`: a tuner that goes on after a configuration's errors must not go on after this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside once so many seconds have passed."""
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
            # Somebody else's alarm was set: it still goes off when it was to.
            remaining = others - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-6), interval)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
