"""Mends requests before Ray Serve's own middleware reads them, and HTTP/1.0 answers after it.

Serve puts this middleware around its own where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names
`server_edge`, as serve.env does: in the ingress's replicas behind HAProxy, else in Serve's proxies.
It is outermost there, directly inside uvicorn. The application's own middleware comes too late for
both jobs:

- Serve puts the client's `X-Request-Id` onto the answer as it came. Here an id that does not match
  the pattern is replaced first.
- uvicorn's parser for speed (httptools) sends chunks to HTTP/1.0 clients too, which do not know
  them, and HAProxy passes them on.

Source: https://www.rfc-editor.org/rfc/rfc9112#section-6.1 (no Transfer-Encoding for HTTP/1.0)
"""

from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_app.http.request_id import REQUEST_ID_HEADER, chosen_id

Headers = list[tuple[bytes, bytes]]

_ID_NAME: Final = REQUEST_ID_HEADER.lower().encode()


def server_edge() -> list[Middleware]:
    """Return the middleware that Serve puts around its own."""
    return [Middleware(ServerEdgeMiddleware)]


class ServerEdgeMiddleware:
    """Replaces invalid request ids, and keeps chunks from HTTP/1.0 clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; most requests need no change."""
        if scope["type"] == "http":
            scope["headers"] = with_valid_id(scope["headers"])
            if scope["http_version"] == "1.0":
                send = without_chunks(send)
        await self._app(scope, receive, send)


def with_valid_id(headers: Headers) -> Headers:
    """Return the headers with at most one request id, and a new one in place of an invalid one."""
    given = [value for name, value in headers if name == _ID_NAME]
    if not given:
        return headers
    chosen = chosen_id(given[0].decode("latin-1")).encode()
    if given == [chosen]:
        return headers
    return [*(header for header in headers if header[0] != _ID_NAME), (_ID_NAME, chosen)]


def without_chunks(send: Send) -> Send:
    """Return a `send` whose answers of unknown length end with the connection, without chunks.

    ASGI has no message for that, so this sets what uvicorn would set for an answer with a
    Content-Length. uvicorn closes connections of HTTP/1.0 in any case.

    Args:
        send: uvicorn's. Any other is returned as it is; h11, uvicorn's other parser, needs no help.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return send
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked
