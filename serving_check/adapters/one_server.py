"""Refuses one server behind both URLs, which would be compared with itself.

Both the addresses and the counters are compared: one server must not count the other server's requests.
"""

import socket
from urllib.parse import urlsplit

from ...base.errors import UserError
from .endpoint import Endpoint
from .prometheus_text import total

SAME = 0.9
"""Share of one side's generated tokens in the other side's counter from which on both are one server."""


def refuse_one_address(artifact: Endpoint, baseline: Endpoint) -> None:
    """Raise UserError if both endpoints are the same port of the same machine, even under different names."""
    if _addresses(artifact.base_url) & _addresses(baseline.base_url):
        raise UserError(
            f"{artifact.base_url} and {baseline.base_url} are the same server; "
            "give the artifact and its baseline separate servers"
        )


def refuse_shared_counter(
    artifact: Endpoint, before: dict[str, float], after: dict[str, float], tokens: int
) -> None:
    """Raise UserError if the artifact's counter rose by the `tokens` that only the baseline was asked for."""
    series = artifact.series.generation_tokens
    first, last = total(before, series), total(after, series)
    if first is None or last is None or not tokens or last - first < SAME * tokens:
        return
    raise UserError(
        f"the artifact's server at {artifact.base_url} generated {last - first:.0f} tokens while only "
        f"the baseline's server was asked for {tokens} tokens: either one server is behind both URLs, or "
        "other clients use it; give each side a server of its own"
    )


def _addresses(url: str) -> set[tuple[str, int]]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return {(parts.hostname or "", port)}
    return {(str(address[4][0]), port) for address in found}
