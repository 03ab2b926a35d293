"""Names every request, so that an answer, a log line and a sequence can be told to belong together.

A client may bring its own name. One that does not match the pattern is replaced, because names go
into logs and headers.
"""

import re
import secrets
from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER: Final = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def request_id_of(request: Request) -> str:
    """Return the name that the middleware has given to the request."""
    return str(request.scope["state"]["request_id"])


def echo_headers(request: Request) -> dict[str, str]:
    """Return what an answer needs that is made outside of the middleware."""
    state = request.scope["state"]
    return {} if state["id_is_echoed"] else {REQUEST_ID_HEADER: state["request_id"]}


class RequestIdMiddleware:
    """Puts the request's id into `scope["state"]` and onto the answer."""

    def __init__(self, app: ASGIApp, door_echoes_id: bool = False) -> None:
        """Wrap an application.

        Args:
            app: What is wrapped.
            door_echoes_id: The server in front puts the request's id on the answer already, as Ray
                Serve does. A second header would say the same, unless the id was replaced.
        """
        self._app = app
        self._door_echoes_id = door_echoes_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        is_valid = given is not None and _VALID.fullmatch(given) is not None
        request_id = given if given is not None and is_valid else secrets.token_hex(16)
        is_echoed = self._door_echoes_id and is_valid
        scope.setdefault("state", {}).update(request_id=request_id, id_is_echoed=is_echoed)

        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            return send(message)

        await self._app(scope, receive, send if is_echoed else send_named)
