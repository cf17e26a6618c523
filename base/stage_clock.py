"""Times the parts of a long job and says each in a line, on a terminal and without one.

Progress bars are for whoever sits before them; these lines are for logs, and the seconds for the report.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .log import logger


@dataclass
class StageClock:
    """Lines go to the log, each with the time since this was made; none where `shown` is false."""

    shown: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    """What each stage took, in the order in which they ended; stages may run at the same time."""
    _started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is inside as `name`; one that fails is not said to have ended."""
        began = self.elapsed
        yield
        self.add(name, self.elapsed - began)

    def add(self, name: str, seconds: float) -> None:
        """Count and say what a stage took that ended just now."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        self.say(f"{name}: {seconds:.1f} s")

    def say(self, text: str) -> None:
        if self.shown:
            logger.info(f"[{self.elapsed:4.0f} s] {text}")


def in_words(seconds: float) -> str:
    """`40 s`, `3 min`."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} min"
