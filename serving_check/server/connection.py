"""uvicorn's HTTP connection, with the limits it lacks: on headers, on unread answers, on the number of
connections.

Nothing here runs per token: timers exist only while a client is slow.
"""

import asyncio
import contextlib
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import ApiError
from .limits import ServerLimits

REASONS = {
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
MOST_HEADER_BYTES = 1 << 16
SPARE_FILES = 256
"""Number of file descriptors for everything other than connections."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """One connection; closed if it takes too long over a request's headers, or leaves an answer unread."""

    def __init__(self, limits: ServerLimits, **uvicorns: Any):
        super().__init__(**uvicorns)
        self._limits = limits
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Number of header bytes received of a request whose headers are incomplete."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"this server takes {self._limits.max_connections} connections; try again later"
            self._refuse(ApiError(message, status=503, code="too_many_connections"))
            return
        self._headers_due = self.loop.call_later(self._limits.header_seconds, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_headers()
        self._client_reads_again()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_headers()
            self._header_bytes = 0
            return
        self._header_bytes += len(data)
        if self._header_bytes > MOST_HEADER_BYTES:
            message = f"the request's headers have more than {MOST_HEADER_BYTES} bytes"
            self._refuse(ApiError(message, status=431, code="headers_too_large"))
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(self._limits.header_seconds, self._headers_are_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self._limits.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._client_reads_again()
        super().resume_writing()

    def _client_reads_again(self) -> None:
        """Note that the client reads again or has gone."""
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def _cancel_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _headers_are_late(self) -> None:
        """Refuse a request whose headers are late, unless they have arrived unread. After a server has stood
        still, its timers may run before it reads its sockets, which it does before the next timers."""
        self._headers_due = self.loop.call_later(0, self._close_for_headers)

    def _close_for_headers(self) -> None:
        self._headers_due = None
        if not self._header_bytes:
            self.transport.close()
            return
        seconds = self._limits.header_seconds
        message = f"the request's headers took longer than {seconds} s, this server's --header-seconds"
        self._refuse(ApiError(message, status=408, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Refuse the request with bytes of our own, since HTTP's state machine is in the middle of a
        request."""
        body = bytes(error.response().body)
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (error.status, REASONS[error.status])
        head += b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.transport.close()


def allow_open_files(connections: int) -> None:
    """Allow this process as many descriptors as its connections need, if the system permits it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = connections + SPARE_FILES
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
