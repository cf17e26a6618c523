"""The progress bar of every long job: tqdm's on a terminal, otherwise a whole line every few seconds.

Messages that must appear even without a progress bar are in `base/stage_clock.py`.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from .log import is_quiet

LINE_SECONDS = 5.0
"""Seconds between two lines. A job that ends sooner prints none."""
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt}, {elapsed} so far, {remaining} left{postfix}"


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool | None, **options: Any) -> tqdm:
    """A bar on stderr; `options` are tqdm's.

    shown: whether to show it; None shows it on a terminal only. With `--quiet` there is no bar (`log.py`).
    """
    on_terminal = sys.stderr.isatty()
    kind = Bar if on_terminal else ProgressLines
    shown = on_terminal if shown is None else shown
    return kind(iterable, disable=is_quiet() or not shown, **options)


class Bar(tqdm):
    """tqdm's bar, except that an interrupt while the bar is being created leaves an object that can be
    closed.
    """

    disable: bool = True


class ProgressLines(Bar):
    """Progress for logs and pipes, in whole lines. The final line is printed only if another line came before
    it.
    """

    monitor_interval = 0
    """Turns off tqdm's monitor thread, which would redraw."""
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
        """Do nothing: there is no bar on the line."""

    def _say(self) -> None:
        line = str(self)
        if line != self._said:
            self.fp.write(f"{line}\n")
            self.fp.flush()
        self._said, self._said_at = line, time.monotonic()
