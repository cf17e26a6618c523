"""The error class for mistakes of the user and limits of the machine. Not for programming errors."""

import click


class UserError(click.ClickException):
    """Something the user can fix. The message says what is wrong, where, and what to do.

    On the command line it is printed to stderr without a traceback; the exit status is 2.
    """

    exit_code = 2
