"""What is refused before any route sees the request: a body too large, and orders to Ray Serve.

Serve reads two headers from any client before our code runs: one switches its detection of
disconnects off, the other sets its time limit. They can't be taken out from here, so a request that
carries one is refused.
"""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import InvalidRequestError, RequestTooLargeError
from serve_app.api.errors import error_response

SERVE_HEADERS: Final = ("x-request-disconnect-disabled", "x-request-timeout-seconds")


class RequestGuardMiddleware:
    """Counts the body while it is read, and refuses forbidden headers."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        """Wrap an application.

        Args:
            app: What is wrapped.
            max_body_bytes: The largest body that is read.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request at once, or pass it on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, headers: Headers) -> InvalidRequestError | None:
        for name in SERVE_HEADERS:
            if name in headers:
                return InvalidRequestError(f"The header {name!r} is not accepted.", name)
        length = headers.get("content-length", "")
        # A length that is no number is the server's to refuse; the count below holds anyway.
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes):
            return self._too_large()
        return None

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"The body is larger than {self._max_body_bytes} bytes, the most that is read."
        )
