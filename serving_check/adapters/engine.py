"""The engine seam: how a server is started on a checkpoint, its options, and its figures.

There is one file in this folder for each engine; `all_engines.py` registers the engines. This file has data
and functions, and starts no server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...base.registry import Registry
from ..engine.options import EngineOptions
from .endpoint import Endpoint
from .placement import ANYWHERE, Placement
from .series import Series


@dataclass(frozen=True)
class MemoryGrant:
    """The memory that a server may take on each of its GPUs."""

    share: float
    """The share of the GPU's whole memory, 0 to 1."""
    kv_cache_bytes: int | None = None
    """Bytes of that memory for keys and values; None lets the engine find out how much is left for them."""


@dataclass(frozen=True)
class ServerJob:
    """A server to be started."""

    engine: str
    """The engine as the user gave it: a name or a URL."""
    side: str
    """`artifact`, `baseline` or `rival`. It is the served model's name if the engine allows one to be set."""
    folder: Path
    """The checkpoint."""
    options: EngineOptions
    log: Path
    memory: MemoryGrant | None = None
    """The memory for an engine that takes a share of a GPU; None leaves the amount to the engine."""
    progress: bool = True
    placement: Placement = ANYWHERE
    devices: tuple[int, ...] = ()
    """The GPUs that the server runs on; empty leaves the choice to the engine."""


class Server(Protocol):
    """A server that can be started. As a context manager the server is started at the beginning and stopped
    at the end."""

    def start(self) -> Endpoint:
        """Start the server and wait until it serves. A server that cannot start raises UserError with the end
        of its log.
        """

    def stop(self) -> None:
        """End the server; calling this twice is safe."""

    def __enter__(self) -> Endpoint: ...

    def __exit__(self, *exc_info: object) -> None: ...


@dataclass(frozen=True)
class Availability:
    """The entry of an engine in `pipeline doctor`."""

    available: bool
    detail: str
    install: str | None = None
    """How to install the engine if it is missing."""


@dataclass(frozen=True)
class CardCommand:
    """The command on a release's card that serves the release."""

    title: str
    language: str
    code: str


@dataclass(frozen=True)
class Engine:
    """One engine, which `--engine` selects by its name."""

    name: str
    title: str
    """The engine's name in sentences on a card: "measured on vLLM"."""
    server: Callable[[ServerJob], Server]
    """Makes the server for a job, with its command, environment and log, but does not start it."""
    availability: Callable[[], Availability]
    series: Series
    options: frozenset[str]
    """The fields of EngineOptions and Placement that the engine supports; if a user gives any other, it is
    refused."""
    versions: Callable[[], Mapping[str, str]] = dict
    """The versions of the packages in the engine's own environment; empty if it runs in ours or elsewhere."""
    card_command: Callable[[str, str | None], CardCommand | None] = lambda model, method: None
    """The command that serves `model`, a Hub id or a folder, quantized by `method`; None if there is none."""
    kv_cache_words: Callable[[str], Sequence[str] | None] = lambda kv_format: ()
    """The words that its command needs for the KV format `kv_format`; None if it does not support the
    format."""
    packs_with_layouts: bool = False
    """Whether it serves in the layouts of `layouts/` as this process does: then `loads` compares what both
    packed, and a slow M may be a layout's fault."""
    starts: bool = True
    """Whether Scalegate starts its server; otherwise the server is running already."""
    memory_option: str | None = None
    """The option of its command for a share of the GPU's memory; None if it has no such option."""
    takes_kv_cache_bytes: bool = False
    """Whether it can be given the bytes for keys and values, so that it need not measure how much is free."""
    prefixes: tuple[str, ...] = ()
    """Words after `--engine` that begin with one of these prefixes select this engine, too."""


ENGINES: Registry[Engine] = Registry("engine")
