"""`pipeline serve`: parses options and calls `serve`."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...base.errors import UserError
from ...serving_check.engine.options import EngineOptions
from ...serving_check.server.limits import ServerLimits
from .options import options_from

MOST_KEY_CHARACTERS = 4096


@click.command("serve")
@click.argument("artifact")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first line is the key that clients must send to /v1. Without a key, anyone may use /v1.",
)
@click.option(
    "--api-key",
    envvar="SCALEGATE_API_KEY",
    show_envvar=True,
    help="The API key itself. Every user of this machine can read a key on the command line.",
)
@click.option(
    "--served-model-name", metavar="NAME", help="Name of the model in requests.  [default: ARTIFACT]"
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False),
    help="Jinja template for conversations, instead of the checkpoint's own.",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of ARTIFACT, if it is a Hub id.")
@options_from(EngineOptions)
@options_from(ServerLimits)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that running requests get to finish after SIGTERM.",
)
@click.pass_context
def command(
    context: click.Context, artifact: str, api_key: str | None, api_key_file: str | None, **options: Any
) -> None:
    """Serve ARTIFACT, a folder or a Hub id, over an OpenAI-compatible HTTP API.

    The server prints one line when it is ready for requests. After SIGTERM or Ctrl-C the server accepts no
    new requests, finishes the running requests, and exits.

    \b
    Examples:
        pipeline serve examples/qwen3-pycode-5m
        pipeline serve work/Qwen3-8B-INT4 --port 0 --max-num-seqs 64
        pipeline serve work/Qwen3-8B-INT4 --kv-cache-dtype kvarn_k4v2_g128
        pipeline serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key-file key.txt --protect-all
    """
    from ..commands.serve import serve

    if api_key_file is not None:
        if context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--api-key and --api-key-file are both given; give one")
        api_key = read_api_key(Path(api_key_file))
    serve(artifact, api_key=api_key, **options)


def read_api_key(path: Path) -> str:
    """Return the key in the first line of the file `path`; UserError if the line is not a key."""
    try:
        key = path.open(encoding="utf-8").readline(MOST_KEY_CHARACTERS + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the API key cannot be read from {path} ({error}); give a text file") from error
    if not key or len(key) > MOST_KEY_CHARACTERS:
        raise UserError(
            f"the first line of {path} is not an API key; write a key of 1 to {MOST_KEY_CHARACTERS} "
            "characters into that line"
        )
    return key
