"""Times the stages of a long job and prints a line for each.

The lines also appear in logs, unlike progress bars; the seconds go into the report.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .log import logger


@dataclass
class StageClock:
    """Writes to the log, each line with the seconds since the clock was made. Silent if not `shown`."""

    shown: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, in the order in which stages ended. Stages may overlap."""
    _started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the `with` block as stage `name`. A block that raises is not recorded."""
        began = self.elapsed
        yield
        self.add(name, self.elapsed - began)

    def add(self, name: str, seconds: float) -> None:
        """Record and print the seconds of a stage that has just ended."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        self.say(f"{name}: {seconds:.1f} s")

    def say(self, text: str) -> None:
        if self.shown:
            logger.info(f"[{self.elapsed:4.0f} s] {text}")


def in_words(seconds: float) -> str:
    """A duration for people to read: `40 s`, `3 min`."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} min"
