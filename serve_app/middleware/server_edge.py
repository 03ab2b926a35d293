"""Refuses requests that are not for this process, and mends others before Ray Serve reads them.

Serve puts this middleware around its own where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names
`server_edge`, as serve.env does: in the ingress's replicas behind HAProxy, else in Serve's proxies.
It is outermost there, directly inside uvicorn. The application's own middleware comes too late for
its jobs:

- HAProxy may still know a port that has become another server's. A request that is meant for
  another replica is refused, and the answer to a health check names this one (`replica_header`).

- Serve puts the client's `X-Request-Id` onto the answer as it came. Here an id that does not match
  the pattern is replaced first.
- uvicorn's parser for speed (httptools) sends chunks to HTTP/1.0 clients too, which do not know
  them, and HAProxy passes them on.

Source: https://www.rfc-editor.org/rfc/rfc9112#section-6.1 (no Transfer-Encoding for HTTP/1.0)
"""

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from deployments.contract.errors import ReplicaUnavailableError
from deployments.replica.own_actor import own_actor_name
from serve_app.http.errors import error_response
from serve_app.http.request_id import REQUEST_ID_HEADER, chosen_id
from serve_app.middleware.replica_header import HEALTH_PATH, REPLICA_HEADER, haproxy_name

Headers = list[tuple[bytes, bytes]]

_ID_NAME: Final = REQUEST_ID_HEADER.lower().encode()
_REPLICA_NAME: Final = REPLICA_HEADER.lower().encode()

MISDIRECTED: Final = (
    "The replica that this request was meant for has gone. Send the request again in a moment."
)


def server_edge() -> list[Middleware]:
    """Return the middleware that Serve puts around its own."""
    name = own_actor_name()
    return [Middleware(ServerEdgeMiddleware, None if name is None else haproxy_name(name))]


class ServerEdgeMiddleware:
    """Refuses what is meant for another replica, and mends request ids and HTTP/1.0 answers."""

    def __init__(self, app: ASGIApp, replica: str | None = None) -> None:
        """Wrap an application.

        Args:
            app: The application.
            replica: This process's name in HAProxy's configuration; None if it has none.
        """
        self._app = app
        self._replica = None if replica is None else replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; most requests need no change."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._replica is not None:
            if is_misdirected(scope["headers"], self._replica):
                refusal = error_response(ReplicaUnavailableError(MISDIRECTED))
                await refusal(scope, receive, send)
                return
            if scope["path"].endswith(HEALTH_PATH):
                send = with_replica(send, self._replica)
        scope["headers"] = with_valid_id(scope["headers"])
        if scope["type"] == "http" and scope["http_version"] == "1.0":
            send = without_chunks(send)
        await self._app(scope, receive, send)


def is_misdirected(headers: Headers, replica: bytes) -> bool:
    """Return whether HAProxy has sent the request to another replica than this one."""
    return any(name == _REPLICA_NAME and value != replica for name, value in headers)


def with_replica(send: Send, replica: bytes) -> Send:
    """Return a `send` whose answer names this replica, if it is that of a health check."""

    def send_named(message: Message) -> Awaitable[None]:
        # A stranger's request to a path that ends like a health check's is refused.
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
            message["headers"] = [*message["headers"], (_REPLICA_NAME, replica)]
        return send(message)

    return send_named


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
