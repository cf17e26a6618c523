"""Serving a checkpoint over the OpenAI-compatible API: loading, address and lifetime.

The server itself is `serving_check/server`, which knows nothing of checkpoints.
"""

import functools
from pathlib import Path
from typing import Any

from ...base.option_fields import from_given, takes
from ...serving_check.engine.options import EngineOptions
from ...serving_check.server.limits import ServerLimits
from ...serving_check.server.run import ServerOptions, run_server
from ..machine.tested_stack import warn_if_untested
from ..model_loader.served_checkpoint import build_engine, describe, engine_of


@takes(EngineOptions, ServerLimits)
def serve(
    artifact: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    served_model_name: str | None = None,
    revision: str | None = None,
    drain_seconds: float = 30.0,
    chat_template: str | Path | None = None,
    **limits_and_engine_options: Any,
) -> None:
    """Serve `artifact`, a folder or a Hub id of any convention we read, until SIGTERM or SIGINT.

    host:              the address to listen at; without `api_key`, everybody who reaches it can use the API
    port:              the port; 0 takes a free one, which the ready line names
    served_model_name: the model's name for clients; None takes `artifact` as it was given
    chat_template:     file with a Jinja template for conversations; None takes the checkpoint's own
    drain_seconds:     how many seconds running requests may take to finish after SIGTERM
    limits_and_engine_options: the fields of ServerLimits (`serving_check/server/limits.py`) and of
                       EngineOptions (`serving_check/engine/options.py`)
    """
    limits = from_given(ServerLimits, limits_and_engine_options)
    options = from_given(EngineOptions, limits_and_engine_options)
    warn_if_untested()
    folder = checkpoint_folder(artifact, revision)
    run_server(
        ServerOptions(host, port, api_key, drain_seconds, limits),
        served_model_name or str(artifact),
        functools.partial(describe, folder, None if chat_template is None else Path(chat_template)),
        functools.partial(engine_of, build_engine, folder, options),
    )


def checkpoint_folder(artifact: str | Path, revision: str | None) -> Path:
    """Return the checkpoint's folder; a Hub id is downloaded first."""
    folder = Path(artifact).expanduser()
    if folder.is_dir() and revision is None:
        return folder
    from ..checkpoints.checkpoint import open_checkpoint

    return open_checkpoint(str(artifact), revision).folder
