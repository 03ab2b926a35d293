"""Drops clients that stop reading.

The server's socket takes some 64 KiB on top of what the system buffers. After that, writing waits
and nothing more is taken from the replica, which produces at most the rest of this one answer. When
a write has waited too long, the client loses its stream and the sequence is aborted. Other requests
are not affected.
"""

import asyncio
import logging
from contextlib import closing
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.request_record import record_of

logger = logging.getLogger("ray.serve")

SLOW_READER_TIMEOUT: Final = "slow_reader_timeout"
"""The error code in the access log; the client gets no further message."""


class SlowReaderMiddleware:
    """Bounds how long one write may take."""

    def __init__(self, app: ASGIApp, timeout_s: float | None) -> None:
        """Wrap an application.

        Args:
            app: The application. `AccessLogMiddleware` must have opened its requests' records.
            timeout_s: Most seconds that a write waits for the client; None waits forever.
        """
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; drop the client when it stops reading."""
        if self._timeout_s is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(None) as timer:
                with closing(_Writes(send, self._timeout_s, timer)) as writes:
                    await self._app(scope, receive, writes.send)
        except TimeoutError:
            if not timer.expired():
                raise
            # The answer ends without its last chunk, so no client takes it for complete.
            record_of(scope).failed(SLOW_READER_TIMEOUT)
            logger.warning(
                "dropped a client that left its answer unread for %g s "
                "(limits.slow_reader_timeout_s)",
                self._timeout_s,
            )


class _Writes:
    """The writes of one answer, one at a time, watched by one timer.

    The timer is set for the earliest time at which the current write, or the next one, could be
    late. So there is no timer for each of the many messages.
    """

    def __init__(self, send: Send, timeout_s: float, giving_up: asyncio.Timeout) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._giving_up = giving_up
        self._loop = asyncio.get_running_loop()
        self._started_s: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._look)

    async def send(self, message: Message) -> None:
        self._started_s = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._started_s = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        late_s = (now_s if self._started_s is None else self._started_s) + self._timeout_s
        if late_s <= now_s:
            self._giving_up.reschedule(now_s)
        else:
            self._timer = self._loop.call_at(late_s, self._look)
