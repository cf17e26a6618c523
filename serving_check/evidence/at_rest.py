"""What a server shows when its load has ended: what it still holds, and whether it is as fast as at first.

`gate/at_rest.py` looks, `checks/` judge.
"""

from dataclasses import dataclass

from ..settings import DOCUMENTED


@dataclass(frozen=True)
class Rest:
    """One server's figures while nothing is asked of it; null where it does not say."""

    __pydantic_config__ = DOCUMENTED

    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    """0 to 1."""
    memory_bytes: int | None
    """Of its processes in host memory."""


@dataclass(frozen=True)
class AtRestFigures:
    """Both servers before the stage as in use, and after it and a burst of small requests."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    """That the artifact's server answered in between."""
    before: Rest
    after: Rest
    burst_seconds: tuple[float, ...]
    """Of each equal part of the burst of small requests at the artifact's server."""
    burst_memory: tuple[int | None, ...]
    """Its memory in bytes after each of these parts."""
    first_m: int
    """The M whose speed was measured again at the end."""
    first: tuple[float, ...]
    """Output tokens per second of the artifact's server at that M, at first."""
    last: tuple[float, ...]
    """The same at the end."""
    baseline_first: tuple[float, ...] = ()
    baseline_last: tuple[float, ...] = ()
