"""What becomes of a client that stops reading.

The server's socket takes some 64 KiB on top of what the system buffers; then writing waits, nothing
more is taken from the replica, and what it still makes is at most the rest of one answer. When that
has lasted too long, the client loses its stream, whose sequence is aborted. Nobody else is harmed.
"""

import asyncio
import logging
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.access_log import record_of

logger = logging.getLogger("ray.serve")


SLOW_READER_TIMEOUT: Final = "slow_reader_timeout"
"""The code in the access log; the client itself is told nothing more."""


class SlowReaderError(OSError):
    """The client has left its answer unread for too long."""


class SlowReaderMiddleware:
    """Bounds how long one write may take."""

    def __init__(self, app: ASGIApp, timeout_s: float | None) -> None:
        """Wrap an application.

        Args:
            app: What is wrapped. Requests must have their records by now.
            timeout_s: Most seconds that a write waits for the client; None waits for ever.
        """
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; give the client up when it stops reading."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s) as timer:
                    await send(message)
            except TimeoutError:
                if not timer.expired():
                    raise
                logger.warning(
                    "a client has left its answer unread for %g s (slow_reader_timeout_s) and has "
                    "lost it",
                    self._timeout_s,
                )
                record_of(scope).failed(SLOW_READER_TIMEOUT)
                raise SlowReaderError from None

        try:
            await self._app(scope, receive, send_in_time)
        except SlowReaderError:
            # The answer ends without its last chunk, so no client takes it for whole.
            return
