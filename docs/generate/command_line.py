"""The command line as a page: every command's help, as `pipeline COMMAND --help` prints it."""

from click import Context
from scalegate.pipeline.cli.main import COMMANDS, main

WIDTH = 100


def reference() -> str:
    top = Context(main, info_name="pipeline", terminal_width=WIDTH, max_content_width=WIDTH)
    return "\n".join(_section(top, name) for name in COMMANDS)


def _section(top: Context, name: str) -> str:
    command = main.get_command(top, name)
    assert command is not None
    context = Context(command, info_name=name, parent=top, terminal_width=WIDTH, max_content_width=WIDTH)
    return f"## pipeline {name}\n\n```text\n{command.get_help(context)}\n```\n"
