"""Answers HEAD wherever GET is answered, with the same headers and no body.

Source: https://www.rfc-editor.org/rfc/rfc9110#name-head
"""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Passes HEAD on as GET and drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a HEAD request; pass any other request on unchanged."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return self._app(scope, receive, send)

        async def send_bodiless(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        return self._app({**scope, "method": "GET"}, receive, send_bodiless)
