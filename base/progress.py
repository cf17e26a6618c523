"""The one progress bar of every long job: tqdm's on a terminal, a whole line every few seconds without one.

Not for what a job has to say (`base/stage_clock.py`), which is said whether anybody watches or not.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from .log import is_quiet

LINE_SECONDS = 5.0
"""Between two lines; what is quicker says nothing."""
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt}, {elapsed} so far, {remaining} left{postfix}"


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool | None, **options: Any) -> tqdm:
    """A bar on stderr that takes `options` as tqdm does.

    shown: None on a terminal only; nothing is written if it is false, or the command is quiet (`log.py`)
    """
    on_terminal = sys.stderr.isatty()
    kind = tqdm if on_terminal else ProgressLines
    shown = on_terminal if shown is None else shown
    return kind(iterable, disable=is_quiet() or not shown, **options)


class ProgressLines(tqdm):
    """For logs and pipes: never a carriage return, and a last line only after a first."""

    monitor_interval = 0
    """tqdm's thread, which redraws."""
    disable: bool
    bar_format: str | None

    def __init__(self, *arguments: Any, **options: Any):
        self._said_at = time.monotonic()
        self._said: str | None = None
        super().__init__(*arguments, **options)
        if not self.disable and self.total and self.bar_format is None:
            self.bar_format = LINE

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() - self._said_at >= LINE_SECONDS:
            self._say()

    def close(self) -> None:
        if self.disable:
            return
        if self._said is not None:
            self._say()
        self.disable = True
        self._decr_instances(self)

    def clear(self, nolock: bool = False) -> None:
        """There is nothing on the line."""

    def _say(self) -> None:
        line = str(self)
        if line != self._said:
            self.fp.write(f"{line}\n")
            self.fp.flush()
        self._said, self._said_at = line, time.monotonic()
