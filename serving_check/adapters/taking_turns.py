"""Servers that do not fit in memory together: one is up at a time."""

from collections.abc import Mapping

from .endpoint import Endpoint
from .subprocess_endpoint import SubprocessEndpoint


class TakingTurns:
    """The running server is ended before another is started; each server keeps its address. Call `stop` at
    the end.
    """

    def __init__(self, servers: Mapping[str, SubprocessEndpoint]):
        self._servers = servers
        self._endpoints: dict[str, Endpoint] = {}
        self.up: str | None = None

    def take(self, side: str) -> Endpoint:
        """Return the endpoint of that side's server, which is now up. A server that does not start raises
        UserError.
        """
        if self.up == side:
            return self._endpoints[side]
        self.stop()
        if side in self._endpoints:
            self._servers[side].restart()
        else:
            self._endpoints[side] = self._servers[side].start()
        self.up = side
        return self._endpoints[side]

    def endpoint(self, side: str) -> Endpoint:
        """Return the endpoint of a server that has run before."""
        return self._endpoints[side]

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
        self.up = None
