"""Checks before anything is parsed: the API key, then the size, then the body itself, all bounded.

An ASGI middleware. A refused request has cost no more than its headers and at most one body's length of
bytes.
"""

import asyncio
import contextlib
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .limits import MIB, ServerLimits

DRAIN_SECONDS = 2.0
"""How long a refused body is still read and dropped, so that its sender gets to see the refusal."""
KEYED = ("/v1", "/tokenize", "/detokenize")
"""The paths that require the API key, if the server has one."""
BODIES_AT_ONCE = 32
"""How many bodies of the largest size may arrive at a time, over all connections."""


class Admission:
    """Reads each request's body within its limits, and hands it on whole."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, api_key: str | None):
        self.app = app
        self.limits = limits
        self.api_key = None if api_key is None else api_key.encode()
        self._arriving = 0
        """Number of bytes of the bodies that are being read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers)
            self._check_length(headers)
            body = await self._read(receive)
        except ApiError as error:
            await _refuse(error, b"expect" not in headers, receive, send)
            return
        if body is not None:
            await self.app(scope, _replayed(body, receive), send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        needed = path != "/health" if self.limits.protect_all else path.startswith(KEYED)
        if self.api_key is None or not needed:
            return
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not secrets.compare_digest(given, self.api_key):
            raise ApiError(
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        # A length that is no number is the protocol's affair; one of more digits than fit is too large.
        if length.isdigit() and (len(length) > 18 or int(length) > self.limits.max_body_bytes):
            raise self._too_large()

    def _too_large(self) -> ApiError:
        most = self.limits.max_body_bytes
        return ApiError(
            f"the request body has more than {most} bytes ({most // MIB} MiB), this server's --max-body-mib; "
            "send fewer or shorter prompts at a time",
            status=413,
            code="request_too_large",
        )

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the request's body; None if the client left before its end."""
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self._arriving += len(chunk)
                    if size > self.limits.max_body_bytes:
                        raise self._too_large()
                    if self._arriving > BODIES_AT_ONCE * self.limits.max_body_bytes:
                        raise ApiError(
                            "too many large requests are arriving at once; try again later",
                            status=429,
                            code="too_many_bytes",
                        )
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                f"the request body took longer than {self.limits.body_seconds} s, this server's "
                "--body-seconds; send it faster",
                status=408,
                code="request_timeout",
            ) from None
        finally:
            self._arriving -= size


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return `receive` as it was before the body was read."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


async def _refuse(error: ApiError, drain: bool, receive: Receive, send: Send) -> None:
    """Answer with the error and close. A client may finish sending first, since a reset could overtake the
    answer."""
    response = error.response()
    start: dict[str, Any] = {"type": "http.response.start", "status": error.status}
    await send({**start, "headers": [*response.raw_headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    if drain:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
