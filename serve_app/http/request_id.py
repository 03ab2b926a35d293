"""Gives every request an id that links its answer, its log lines and its sequences.

A client may send an id of its own. One that does not match the pattern is replaced, because ids go
into logs and headers. Ray Serve repeats a client's id unchanged, unless
`middleware.server_edge` has replaced it before.
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


def chosen_id(given: str | None) -> str:
    """Return the client's id if it is valid, else a new one."""
    if given is not None and _VALID.fullmatch(given) is not None:
        return given
    return secrets.token_hex(16)


def request_id_of(request: Request) -> str:
    """Return the id that the middleware has given to the request."""
    return str(request.scope["state"]["request_id"])


def echo_headers(request: Request) -> dict[str, str]:
    """Return the id's header for an answer that is made outside the middleware."""
    state = request.scope["state"]
    return {} if state["id_is_echoed"] else {REQUEST_ID_HEADER: state["request_id"]}


class RequestIdMiddleware:
    """Puts the request's id into `scope["state"]` and onto the answer."""

    def __init__(self, app: ASGIApp, serve_echoes_id: bool = False) -> None:
        """Wrap an application.

        Args:
            app: The application.
            serve_echoes_id: Whether Ray Serve adds the client's id to the answer itself. A second
                header would repeat it, unless the id was replaced.
        """
        self._app = app
        self._serve_echoes_id = serve_echoes_id

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Give the request an id and pass it on."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        request_id = chosen_id(given)
        is_echoed = self._serve_echoes_id and request_id == given
        scope.setdefault("state", {}).update(request_id=request_id, id_is_echoed=is_echoed)

        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            return send(message)

        return self._app(scope, receive, send if is_echoed else send_named)
