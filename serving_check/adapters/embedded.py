"""Our own engine, as an engine to validate on: `pipeline serve` in a process of its own."""

import sys
from dataclasses import fields, replace

from ...base.option_fields import words_of
from ..engine.options import EngineOptions
from .engine import Availability, CardCommand, Engine, ServerJob
from .placement import only_these
from .series import SCALEGATE_SERIES
from .subprocess_endpoint import SubprocessEndpoint


def _server(job: ServerJob) -> SubprocessEndpoint:
    """Return the server of our own engine. The server chooses its own port, and its options decide how much
    memory it takes."""
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(job.folder), "--port", "0"]
    options = replace(job.options, device="cuda") if job.devices else job.options
    command += ["--served-model-name", job.side, *words_of(options.to_json())]
    return SubprocessEndpoint(
        command,
        f"{job.side}'s server",
        log=job.log,
        env=only_these(job.devices),
        startup_timeout=job.placement.startup_timeout,
        progress=job.progress,
    )


EMBEDDED = Engine(
    name="embedded",
    title="Scalegate's own engine",
    server=_server,
    availability=lambda: Availability(True, "Scalegate's own, on every device above"),
    series=SCALEGATE_SERIES,
    options=frozenset(field.name for field in fields(EngineOptions)) | {"devices", "startup_timeout"},
    card_command=lambda model, method: CardCommand("Scalegate's own server", "sh", f"pipeline serve {model}"),
    packs_with_layouts=True,
)
