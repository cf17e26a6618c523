"""Our own engine, as an engine to validate on: `pipeline serve` in a process of its own."""

import sys
from dataclasses import fields

from ..engine.options import EngineOptions
from ..options import words_of
from .engine import Availability, CardCommand, Engine, ServerJob
from .series import SCALEGATE_SERIES
from .subprocess_endpoint import SubprocessEndpoint


def _server(job: ServerJob) -> SubprocessEndpoint:
    """It binds a port of its own choosing; its memory is what its options ask for."""
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(job.folder), "--port", "0"]
    command += ["--served-model-name", job.side, *words_of(job.options.to_json())]
    return SubprocessEndpoint(command, f"{job.side}'s server", log=job.log, progress=job.progress)


EMBEDDED = Engine(
    name="embedded",
    title="Scalegate's own engine",
    server=_server,
    availability=lambda: Availability(True, "Scalegate's own, on every device above"),
    series=SCALEGATE_SERIES,
    options=frozenset(one.name for one in fields(EngineOptions)),
    card_command=lambda model, method: CardCommand("Scalegate's own server", "sh", f"pipeline serve {model}"),
    packs_with_layouts=True,
)
