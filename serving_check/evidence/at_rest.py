"""A server's figures when its load has ended: the memory and pages that it still holds, and whether it is as
fast as at first.

`gate/at_rest.py` collects the figures of this file, and `checks/in_use/at_rest.py` and
`checks/in_use/drift.py` judge them.
"""

from dataclasses import dataclass

from ..settings import DOCUMENTED

PARTS_BEFORE = 4
"""How many parts of a burst come before any requests that are sent between parts."""


@dataclass(frozen=True)
class Rest:
    """One server's figures while it has no requests; a figure is null if the server does not report it."""

    __pydantic_config__ = DOCUMENTED

    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    """The share of the KV cache in use, 0 to 1."""
    memory_bytes: int | None
    """Resident memory of the server's processes on the host, in bytes."""


@dataclass(frozen=True)
class BurstPart:
    """One part of a burst of tiny requests at one server."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    seconds: float
    memory_bytes: int | None = None
    """Resident memory of the server's processes after this part, in bytes; null if it is not known."""


@dataclass(frozen=True)
class AtRestFigures:
    """The artifact's server before and after a load and a burst of tiny requests; both servers' speed at the
    end."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    """Number of requests that the artifact's server was sent between `before` and `after`."""
    before: Rest
    after: Rest
    burst: tuple[BurstPart, ...]
    """The parts of the burst at the artifact's server, in their order; the servers take turns."""
    first_m: int
    """The M whose speed was measured again at the end."""
    first: tuple[float, ...]
    """Output tokens per second of the artifact's server at that M, of each of its first repeats."""
    last: tuple[float, ...]
    """The same for the repeats at the end."""
    baseline_burst: tuple[BurstPart, ...] = ()
    """The parts of the burst at the baseline's server; empty if it was not running."""
    baseline_first: tuple[float, ...] = ()
    baseline_last: tuple[float, ...] = ()
    between: int = 0
    """Number of requests sent after the burst's fourth part, many in each HTTP request, if the parts have too
    few."""
    errors: tuple[str, ...] = ()
    """The errors of requests that failed at the artifact's server at the burst's beginning or in the last
    repeats."""
