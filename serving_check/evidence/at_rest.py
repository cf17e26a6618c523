"""A server's figures when its load has ended: the memory and pages that it still holds, and whether it is as
fast as at first.

`gate/at_rest.py` looks, `checks/in_use/at_rest.py` and `checks/in_use/drift.py` judge.
"""

from dataclasses import dataclass

from ..settings import DOCUMENTED

PARTS_BEFORE = 4
"""Parts of a burst before what may come between them."""


@dataclass(frozen=True)
class Rest:
    """One server's figures while it has no requests; null if it does not report one."""

    __pydantic_config__ = DOCUMENTED

    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    """0 to 1."""
    memory_bytes: int | None
    """Resident memory of its processes on the host."""


@dataclass(frozen=True)
class BurstPart:
    """One part of a burst of tiny requests at one server."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    seconds: float
    memory_bytes: int | None = None
    """Resident memory of the server's processes after it; null where that is not known."""


@dataclass(frozen=True)
class AtRestFigures:
    """The artifact's server before and after a load and a burst of tiny requests; both servers' speed at the
    end."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    """Requests that the artifact's server was sent between `before` and `after`."""
    before: Rest
    after: Rest
    burst: tuple[BurstPart, ...]
    """Of the artifact's server, in their order; the servers take turns."""
    first_m: int
    """The M whose speed was measured again at the end."""
    first: tuple[float, ...]
    """Output tokens per second of the artifact's server at that M, of each of its first repeats."""
    last: tuple[float, ...]
    """The same at the end."""
    baseline_burst: tuple[BurstPart, ...] = ()
    """Empty if the baseline's server was not up."""
    baseline_first: tuple[float, ...] = ()
    baseline_last: tuple[float, ...] = ()
    between: int = 0
    """Requests after the burst's fourth part, many in each HTTP request, where its parts have too few."""
    errors: tuple[str, ...] = ()
    """Of the first requests of the burst, and of the last repeats, that failed at the artifact's server."""
