"""The meaning of every command's exit status, and the handling of unexpected exceptions.

Status 1 means only that the gate failed: a script may read it as "the artifact failed" and nothing else.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import click

UNUSABLE = 2
"""The status for input that the user can correct, for an inconclusive verdict, and for a verdict that is not
published because speed was not judged."""
UNFORESEEN = 70
"""The status for a fault of Scalegate or of the machine (EX_SOFTWARE of sysexits.h)."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""The status if the reader of our output has stopped (128 + SIGPIPE)."""


def run(command: Callable[[], Any]) -> NoReturn:
    """Run a click command that raises instead of exiting, and exit with the status that fits."""
    try:
        status = command()
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(UNUSABLE if error.exit_code == 1 else error.exit_code)
    except (click.Abort, KeyboardInterrupt, EOFError):
        click.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _leave_broken_pipe()
    except SystemExit as end:
        # A command's own status is returned, not raised: click itself exits with 1, and for this alone.
        if end.code != 1:
            raise
        _leave_broken_pipe()
    except Exception as error:
        click.echo(f"Error: {_one_line(error)}; {_details()}", err=True)
        sys.exit(UNFORESEEN)
    sys.exit(status if isinstance(status, int) else 0)


def _leave_broken_pipe() -> NoReturn:
    # The interpreter flushes once more at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(BROKEN_PIPE)


def _one_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _details() -> str:
    """Write the traceback of the current exception to a file, or to stderr if no file can be written; return
    a text that says where it is.
    """
    text = traceback.format_exc()
    try:
        descriptor, path = tempfile.mkstemp(prefix="scalegate-error-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError:
        click.echo(text, err=True)
        return "its traceback is above"
    return f"its traceback is in {path}"
