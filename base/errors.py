"""The one error class for a user's mistake or a machine's refusal; not for programming errors.

It lives at the bottom of the tree so that layouts, the serving check and the pipeline can all raise it.
"""

import click


class UserError(click.ClickException):
    """Something the user can put right: the message says what is wrong, where, and what to do.

    On the command line it is one message on stderr, no traceback, exit status 2.
    """

    exit_code = 2
