"""Refuses requests before any route sees them.

It refuses headers that are too large, a body that is too large or arrives too slowly, and headers
that control Ray Serve.

Serve reads two such headers from any client before our code runs: one switches off its detection of
disconnects, the other sets its time limit. This code can't remove them, so a request that carries
one is refused.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract.errors import (
    HeadersTooLargeError,
    InvalidRequestError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from serve_app.config import LimitsConfig
from serve_app.http.errors import error_response

SERVE_HEADERS: Final = ("x-request-disconnect-disabled", "x-request-timeout-seconds")


class RequestGuardMiddleware:
    """Refuses forbidden headers, and counts the body and its time while it is read."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app = app
        self._limits = limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Refuse the request at once, or pass it on with its body counted."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return error_response(refusal)(scope, receive, send)
        return self._app(scope, _Body(receive, self._limits).receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequestError | None:
        limit = self._limits.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            return HeadersTooLargeError(
                f"The headers are larger than {limit} bytes, the most that is read "
                "(limits.max_header_bytes)."
            )
        headers = Headers(scope=scope)
        for name in SERVE_HEADERS:
            if name in headers:
                return InvalidRequestError(f"The header {name!r} is not accepted.", name)
        length = headers.get("content-length", "")
        # The HTTP server refuses a length that is not a number; `_Body` counts in any case.
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limits.max_body_bytes):
            return _too_large(self._limits)
        return None


class _Body:
    """Counts one request's body while it is read."""

    def __init__(self, receive: Receive, limits: LimitsConfig) -> None:
        self._receive = receive
        self._limits = limits
        self._num_bytes = 0
        self._deadline_s = asyncio.get_running_loop().time() + limits.max_body_read_s
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            # Only the client's disconnect can follow, so there is no deadline.
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"The body did not come within {self._limits.max_body_read_s:g} s "
                "(limits.max_body_read_s)."
            ) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.max_body_bytes:
            raise _too_large(self._limits)
        self._is_whole = not message.get("more_body", False)
        return message


def _too_large(limits: LimitsConfig) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The body is larger than {limits.max_body_bytes} bytes, the most that is read "
        "(limits.max_body_bytes)."
    )
