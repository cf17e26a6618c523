"""`-v/--verbose` and `-q/--quiet` of every command, taken before the command's name and after it."""

import copy

import click

from ...base.log import QUIET, VERBOSE, verbosity


def _show(word: str) -> click.Option:
    """An option that sets how much is shown until the command ends; if several are given, the last one
    counts.
    """

    def callback(context: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            context.with_resource(verbosity(word))

    names = [f"-{word[0]}", f"--{word}"]
    return click.Option(names, is_flag=True, expose_value=False, callback=callback, help=HELP[word])


HELP = {VERBOSE: "Show details as well.", QUIET: "Show only the result, warnings and errors."}
VERBOSITY = (_show(VERBOSE), _show(QUIET))


def with_verbosity(command: click.Command) -> click.Command:
    """A copy of `command` that takes both options."""
    command = copy.copy(command)
    command.params = [*command.params, *VERBOSITY]
    return command
