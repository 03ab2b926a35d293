"""Speaks WebSocket, where the application does.

A handshake passes through the whole application as the GET that it is. So keys, bounds of headers,
the access log and the shapes of errors are those of any request, and a connection is accepted only
where a route answers with 101; any other answer is passed on as it is. Each frame then passes
through the application as a POST with the handshake's headers.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract.errors import UpgradeRequiredError
from serve_app.api.responses.routes import WARMS_UP
from serve_app.api.responses.socket import ResponseSocket
from serve_app.api.responses.sockets import HANDSHAKE, Sockets
from serve_app.config import LimitsConfig
from serve_app.http.errors import error_response
from serve_app.http.exchange import Exchange
from serve_app.http.request_id import REQUEST_ID_HEADER

logger = logging.getLogger("ray.serve")

DENIAL: Final = "websocket.http.response"
"""The extension of ASGI by which a handshake gets an answer of HTTP."""

NOT_SPOKEN: Final = "No WebSocket is spoken here, only at /v1/responses. Send a request instead."

OF_HANDSHAKE: Final = (b"sec-websocket-", b"content-", b"connection", b"upgrade", b"transfer-enc")
OF_REQUEST: Final = REQUEST_ID_HEADER.lower().encode()


class SocketMiddleware:
    """Takes the WebSockets that come to an application."""

    def __init__(self, app: ASGIApp, sockets: Sockets, limits: LimitsConfig) -> None:
        """Wrap an application.

        Args:
            app: All that a request passes through.
            sockets: The connections of the ingress.
            limits: The bounds of each body.
        """
        self._app = app
        self._sockets = sockets
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests on; answer a handshake, and then the frames of its connection."""
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        with self._sockets.place():
            answer = await self._ask(scope)
            await receive()  # that the client wants to connect
            if answer.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                await _deny(answer, scope, receive, send)
                return
            await send({"type": "websocket.accept", "headers": _kept(answer.raw_headers)})
            client = _Client(scope["app"], scope)
            await ResponseSocket(receive, send, client, self._sockets, self._limits).run()

    async def _ask(self, scope: Scope) -> Response:
        """Return the application's answer to a handshake; of one that is not passed on, no body."""
        left = asyncio.Event()
        exchange = Exchange(left=left)

        async def send(message: Message) -> None:
            if not left.is_set():
                await exchange.send(message)
            if exchange.status is not None and _is_unspoken(exchange.status):
                left.set()  # its body may be a large file, or a stream without an end

        get = _request(scope, "GET", scope["headers"], {HANDSHAKE: self._sockets.require_room})
        try:
            await scope["app"](get, exchange.receive, send)
        except Exception:  # the application has answered with a 500
            logger.exception("the server has failed at a handshake")
        status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR
        if _is_unspoken(status):
            return error_response(UpgradeRequiredError(NOT_SPOKEN))
        answer = Response(exchange.body, status)
        answer.raw_headers = exchange.headers.raw
        return answer


class _Client:
    """Asks the application in a connection's name."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._app = app
        self._scope = scope
        self._headers = [
            *_kept(scope["headers"], (*OF_HANDSHAKE, OF_REQUEST)),
            (b"content-type", b"application/json"),
        ]

    async def __call__(
        self, body: bytes, request_id: str, *, generates: bool, receive: Receive, send: Send
    ) -> None:
        """Answer a body; see `Ask`."""
        own = [(b"content-length", b"%d" % len(body)), (OF_REQUEST, request_id.encode())]
        state = {} if generates else {WARMS_UP: True}
        post = _request(self._scope, "POST", [*self._headers, *own], state)
        await self._app(post, receive, send)


def _is_unspoken(status: int) -> bool:
    """Return whether an answer is one of HTTP, where no WebSocket is spoken."""
    return status < HTTPStatus.BAD_REQUEST and status != HTTPStatus.SWITCHING_PROTOCOLS


async def _deny(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if DENIAL in (scope.get("extensions") or {}):
        await answer(scope, receive, send)
    else:  # the server then answers with a 403
        await send({"type": "websocket.close", "code": 1008})


def _request(
    scope: Scope, method: str, headers: list[tuple[bytes, bytes]], state: dict[str, Any]
) -> dict[str, Any]:
    """Return the scope of a request that the client of a connection makes."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "https" if scope.get("scheme") == "wss" else "http",
        "path": scope["path"],
        "raw_path": scope.get("raw_path", scope["path"].encode()),
        "query_string": scope.get("query_string", b""),
        "root_path": scope.get("root_path", ""),
        "headers": headers,
        "client": scope.get("client"),
        "server": scope.get("server"),
        "state": state,
    }


def _kept(
    headers: list[tuple[bytes, bytes]], left_out: tuple[bytes, ...] = OF_HANDSHAKE
) -> list[tuple[bytes, bytes]]:
    """Return the headers without those whose names begin like one that is left out."""
    return [each for each in headers if not each[0].lower().startswith(left_out)]
