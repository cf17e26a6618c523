"""The error class for mistakes of the user and limits of the machine. Programming errors raise other
exceptions.
"""

try:
    from click import ClickException
except ModuleNotFoundError as error:
    if error.name != "click":
        raise

    class ClickException(Exception):  # type: ignore[no-redef]
        """A substitute for click's exception where there is no command line: the wheel of the kernels does
        not need click.
        """

        def __init__(self, message: str):
            super().__init__(message)
            self.message = message


class UserError(ClickException):
    """Something the user can fix. The message says what is wrong, where, and what to do.

    On the command line the message is printed to stderr without a traceback; the exit status is 2.
    """

    exit_code = 2
