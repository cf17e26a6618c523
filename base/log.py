"""The one logger: notices, warnings and details of every command, as lines on stderr.

Commands print their results on stdout, without the logger. The progress bar (`progress.py`) does not use the
logger either, but is hidden at the same levels.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "SCALEGATE_VERBOSITY"
"""The environment variable that holds `quiet` or `verbose`, for this process and those that it starts."""
QUIET, VERBOSE = "quiet", "verbose"
LEVELS = {QUIET: logging.WARNING, VERBOSE: logging.DEBUG}


class LinesOnStderr(logging.Handler):
    """Writes each message as a line on the current `sys.stderr`, above a progress bar if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= least_level() and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n"
        try:
            if sys.stderr.isatty():
                # Importing tqdm takes a tenth of a second, and `--help` logs nothing.
                from tqdm import tqdm

                tqdm.write(line, file=sys.stderr, end="")
            else:
                sys.stderr.write(line)
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: {text}"


logger = logging.getLogger("scalegate")
logger.setLevel(logging.DEBUG)
logger.addHandler(LinesOnStderr())
logger.propagate = False


def least_level() -> int:
    """The level from which on messages are shown: INFO unless the user asked for less or for more."""
    return LEVELS.get(os.environ.get(VARIABLE, ""), logging.INFO)


def is_quiet() -> bool:
    """Whether only warnings and errors are shown."""
    return least_level() > logging.INFO


def is_verbose() -> bool:
    return least_level() < logging.INFO


@contextmanager
def verbosity(word: str) -> Iterator[None]:
    """Show less (QUIET) or more (VERBOSE) inside the `with` block, here and in processes started there."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = word
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
