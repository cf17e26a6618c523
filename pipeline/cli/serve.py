"""`pipeline serve`: parses options and calls `serve`."""

from typing import Any

import click

from .engine_options import engine_options


@click.command("serve")
@click.argument("artifact")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--api-key", envvar="SCALEGATE_API_KEY", help="Key that /v1 asks for; none asks for nothing.")
@click.option("--served-model-name", metavar="NAME", help="What clients call the model; default ARTIFACT.")
@click.option("--revision", help="Branch, tag or commit, where ARTIFACT is a Hub id.")
@engine_options()
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="On SIGTERM, how long running requests may take to finish.",
)
def command(artifact: str, **options: Any) -> None:
    """Serve ARTIFACT, a folder or a Hub id, over an OpenAI-compatible HTTP API.

    Prints one line when it serves. SIGTERM or Ctrl-C stops taking requests, finishes those that run, and
    ends.

    \b
    Examples:
        pipeline serve examples/qwen3-pycode-5m
        pipeline serve work/Qwen3-8B-INT4 --port 0 --max-num-seqs 64
        pipeline serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key "$KEY"
    """
    from ..serve import serve

    serve(artifact, **options)
