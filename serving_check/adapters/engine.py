"""The engine seam: how a server is started on a checkpoint, its options, and its figures.

One file in this folder for each engine; `all_engines.py` registers them. Data and functions, no server.
"""

from collections.abc import Callable, Sequence
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
    """Of the whole memory."""
    kv_cache_bytes: int | None = None
    """Of it for keys and values; None leaves an engine to find out what is left for them."""


@dataclass(frozen=True)
class ServerJob:
    """A server to be started."""

    engine: str
    """The engine as it was asked for: a name, or a URL."""
    side: str
    """`artifact`, `baseline` or `rival`: what the model is called, where an engine lets it be named."""
    folder: Path
    """The checkpoint."""
    options: EngineOptions
    log: Path
    memory: MemoryGrant | None = None
    """For an engine that takes a share rather than what its options ask for; None leaves it to the engine."""
    progress: bool = True
    placement: Placement = ANYWHERE
    devices: tuple[int, ...] = ()
    """The GPUs it runs on; empty leaves it to the engine."""


class Server(Protocol):
    """A server that may be started; as a context manager, started and stopped."""

    def start(self) -> Endpoint:
        """Wait until it serves. UserError with its last words if it cannot."""

    def stop(self) -> None:
        """End it; safe to call twice."""

    def __enter__(self) -> Endpoint: ...

    def __exit__(self, *exc_info: object) -> None: ...


@dataclass(frozen=True)
class Availability:
    """The entry of an engine in `pipeline doctor`."""

    available: bool
    detail: str
    install: str | None = None
    """How to get it, where it is not there."""


@dataclass(frozen=True)
class CardCommand:
    """How a release is served, on its card."""

    title: str
    language: str
    code: str


@dataclass(frozen=True)
class Engine:
    """One engine: a word after `--engine`."""

    name: str
    title: str
    """In a sentence on a card: "measured on vLLM"."""
    server: Callable[[ServerJob], Server]
    """The server for a job, not yet started: its command, its environment, its log."""
    availability: Callable[[], Availability]
    series: Series
    options: frozenset[str]
    """The fields of EngineOptions and Placement that reach its server; the others are refused where a user
    gives them."""
    card_command: Callable[[str, str | None], CardCommand | None] = lambda model, method: None
    """How to serve `model`, a Hub id or a folder, quantized by `method`; None says nothing."""
    kv_cache_words: Callable[[str], Sequence[str] | None] = lambda kv_format: ()
    """What its command needs besides for a checkpoint made for `kv_format`; None if it has none such."""
    packs_with_layouts: bool = False
    """Whether it serves in the layouts of `layouts/` as this process does: then `loads` compares what both
    packed, and a slow M may be a layout's fault."""
    starts: bool = True
    """Whether its server is started here; otherwise it is running already."""
    memory_option: str | None = None
    """The word of its command before a share of the GPU's memory; None if it takes what its options ask
    for."""
    takes_kv_cache_bytes: bool = False
    """Whether, told how much is for keys and values, it does not measure what is free while it starts."""
    prefixes: tuple[str, ...] = ()
    """Words that begin so mean this engine, too."""


ENGINES: Registry[Engine] = Registry("engine")
