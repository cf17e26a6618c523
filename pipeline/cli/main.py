"""The `pipeline` command: its subcommands by name, each imported only when it is called.

This file does no work of its own: a subcommand's file parses options and calls the function of the same name.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import click

from ...base.gc_threshold import search_rarely
from ...base.installed import own_version
from .exit_status import run
from .verbosity import VERBOSITY, with_verbosity

COMMANDS = {
    "quantize": "Quantize a checkpoint, shard by shard.",
    "adopt": "Take over a checkpoint that another tool quantized.",
    "layout": "Measure every layout at every batch size and record the fastest.",
    "serve": "Serve a checkpoint over an OpenAI-compatible HTTP API.",
    "validate": "Test whether an artifact serves as fast as its baseline.",
    "push": "Publish an artifact that has passed, in one atomic commit.",
    "release": "Run quantize, layout, validate and push; resumes if interrupted.",
    "sign": "Sign an artifact's verdict with an SSH key.",
    "verify": "Check a release's digests, figures and signature.",
    "gguf": "Write a checkpoint as one GGUF file for llama.cpp.",
    "compare": "Compare the quality of quantized checkpoints with one baseline.",
    "inspect": "Show what an artifact is and whether its bytes still match.",
    "doctor": "Show what this machine can run and what to install for the rest.",
}


class Commands(click.Group):
    """Subcommands in the order of the work; torch is imported only by those that need it."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run like click's `main`, but with our own exit statuses: the status that click gives for Ctrl-C and
        crashes means a failed gate here.
        """
        search_rarely()
        raising = functools.partial(super().main, args, prog_name, standalone_mode=False, **extra)
        return run(raising) if standalone_mode else raising()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"..cli.{name}", __package__)
        return with_verbosity(module.command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[*VERBOSITY],
)
@click.version_option(own_version())
def main() -> None:
    """Quantize a model, prove that it keeps its speed under batched serving, and only then publish it.

    \b
    Examples:
        pipeline doctor
        pipeline release Qwen/Qwen3-8B --recipe int4-symmetric --to ORG/Qwen3-8B-INT4
        pipeline validate work/Qwen3-8B-INT4 --quiet

    `pipeline COMMAND --help` shows a command's options and examples. The options here may also follow
    COMMAND.

    \b
    Exit status:
        0    done
        1    the gate failed, or a check of `verify`
        2    the verdict is inconclusive, or the input cannot be used
        70   a fault of Scalegate or of the machine
        130  interrupted
        141  nobody reads the output
    """


if __name__ == "__main__":
    main()
