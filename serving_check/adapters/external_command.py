"""The shared part of engines by other projects: a command on PATH, a port, and options for the KV format."""

import functools
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import UserError
from ..engine.options import AUTO, UNQUANTIZED
from .engine import Availability, ServerJob
from .placement import only_these
from .subprocess_endpoint import SubprocessEndpoint, Telemetry

LOOPBACK = "127.0.0.1"
INTERPRETER = re.compile(rb"\A#!\s*([^\s]*python[^\s]*)|\A#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \"\$0\"")
"""The first lines of a script that pip has written; the second form is for long paths."""
PACKAGES = ("torch", "triton", "transformers", "compressed-tensors", "flashinfer-python", "scalegate-kernels")
"""Packages of an engine's environment that a figure may depend on, beside the engine's own."""
ASK_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
ASK_SECONDS = 30.0


@dataclass(frozen=True)
class ExternalCommand:
    """The serving command of another project's engine."""

    command: str
    """The command's name on PATH, which is also the package's name."""
    title: str
    kv_formats: Mapping[str, str]
    """The KV formats of ours that the engine supports, with the engine's own name for each."""

    @property
    def install(self) -> str:
        return (
            f"pip install {self.command} in an environment of its own, and put its `{self.command}` on PATH, "
            f"for --engine {self.command}"
        )

    def availability(self) -> Availability:
        found = shutil.which(self.command)
        if found is None:
            return Availability(False, f"no `{self.command}` command on PATH", self.install)
        version = self.versions().get(self.command)
        return Availability(True, found if version is None else f"{found}, {version}")

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the engine and of `PACKAGES` in the environment that the command runs in;
        empty if the command does not say which interpreter runs it.
        """
        found = shutil.which(self.command)
        return {} if found is None else versions_beside(found, self.command)

    def kv_cache_words(self, kv_format: str) -> tuple[str, ...] | None:
        """Return the words that select a KV format; None if the engine does not support the format."""
        if kv_format == UNQUANTIZED:
            return ()
        name = self.kv_formats.get(kv_format)
        return None if name is None else ("--kv-cache-dtype", name)

    def required_kv_cache_words(self, kv_cache_dtype: str) -> tuple[str, ...]:
        """Return what `kv_cache_words` returns, but raise UserError if the engine does not support the
        format.
        """
        words = () if kv_cache_dtype == AUTO else self.kv_cache_words(kv_cache_dtype)
        if words is None:
            raise UserError(
                f"{self.title} has no KV format {kv_cache_dtype!r}; validate on Scalegate's own engine, or "
                f"give --kv-cache-dtype: {', '.join(self.kv_formats)}"
            )
        return words

    def server(
        self,
        job: ServerJob,
        model: Sequence[str],
        words: Sequence[str],
        telemetry: Telemetry,
        environment: Mapping[str, str] | None = None,
    ) -> SubprocessEndpoint:
        """Return a server on a free loopback port, not yet started. The user's own words come last in the
        server's command.

        Raise UserError if the command is not installed.

        model:       the words that name the checkpoint
        environment: further variables for the server's process
        """
        if shutil.which(self.command) is None:
            raise UserError(
                f"there is no {self.command!r} command here; install {self.title} in an environment of its "
                f"own and put its `{self.command}` on PATH, or start it yourself and pass its URL"
            )
        port = str(free_port())
        command = [self.command, "serve", *model, "--host", LOOPBACK, "--port", port, *words]
        return SubprocessEndpoint(
            [*command, *job.placement.words(job.side)],
            f"{self.command} {job.folder}",
            log=job.log,
            base_url=f"http://{LOOPBACK}:{port}",
            env={**only_these(job.devices), **(environment or {})},
            startup_timeout=job.placement.startup_timeout,
            progress=job.progress,
            telemetry=telemetry,
        )


@functools.cache
def versions_beside(script: str, engine: str) -> Mapping[str, str]:
    """Ask the Python that runs `script` for the versions of `engine` and of `PACKAGES`; empty if it cannot be
    asked.
    """
    try:
        with Path(script).open("rb") as file:
            match = INTERPRETER.match(file.read(4096))
        if match is None:
            return {}
        python = next(filter(None, match.groups())).decode()
        asked = subprocess.run(
            [python, "-c", ASK_VERSIONS, engine, *PACKAGES],
            capture_output=True,
            timeout=ASK_SECONDS,
            check=True,
        )
        return {str(name): str(version) for name, version in json.loads(asked.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def free_port() -> int:
    """Return a port that was free a moment ago, for a command that cannot bind port 0 and print its port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
