"""One line of JSON for each request, written when its answer has ended, however it ended.

A line says which key asked which model, how many tokens that took and how long. It never holds a
prompt, an answer, a key, or a path that a client made up: only numbers, and names from our own
configuration and code. The line is made from the request's `RequestRecord`. Surfaces fill the
record in while they work, and the rate limits charge the tokens it counts.

The logger is a child of Ray Serve's. So the lines go to the ingress's log file, and
`logging_config` in serve_config.yaml sets their format. They stay off standard error, which Ray
would carry to the terminal of `make serve`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract.errors import RaystreamError
from serve_app.http.error_shapes import error_shape_of
from serve_app.http.request_record import (
    CLIENT_DISCONNECTED,
    CURRENT_RECORD,
    Meter,
    RequestRecord,
)
from serve_app.http.route_hints import path_of

OK: Final = HTTPStatus.OK.value
"""A plain number: each event is compared with it, and Python 3.11 takes long to find an enum's."""

logger = logging.getLogger("ray.serve.raystream.access")


class AccessLogMiddleware:
    """Opens a request's record, and writes its line at the end."""

    def __init__(
        self,
        app: ASGIApp,
        writes: bool = True,
        now: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application. `RequestIdMiddleware` must have named its requests.
            writes: Whether lines are written; the records are filled in anyway.
            now: Returns seconds that never run backwards.
            meter: Counts tokens and moves over all requests; None counts nothing.
        """
        self._app = app
        self._writes = writes
        self._now = now
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        record = RequestRecord(
            state["request_id"], scope["method"][:16], self._now, self._now(), meter=self._meter
        )
        record.error_shape = error_shape_of(path_of(scope))
        record.span = state.get("span")
        state["request_record"] = record
        token = CURRENT_RECORD.set(record)
        try:
            await self._app(scope, _listening(receive, record), _watched(send, record))
        except asyncio.CancelledError:
            record.left()  # Serve cancels a request only when its client leaves
            raise
        except BaseException:
            record.status, record.is_answered = 500, True
            record.failed(RaystreamError.code)
            raise
        finally:
            CURRENT_RECORD.reset(token)
            record.route = getattr(scope.get("route"), "path", None)
            if record.has_left or not (record.is_answered or record.error_code):
                record.finish_reason = CLIENT_DISCONNECTED
            if self._writes:
                _write(record)


def _listening(receive: Receive, record: RequestRecord) -> Receive:
    async def listening() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            record.left()
        return message

    return listening


def _watched(send: Send, record: RequestRecord) -> Send:
    def watched(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            return send(message)
        if record.status == OK:  # else the body is an error, whatever was generated
            record.delivered()
        if not message.get("more_body", False):
            record.is_answered = True
        return send(message)

    return watched


def _write(record: RequestRecord) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", record.line(), extra={"log_to_stderr": False})
