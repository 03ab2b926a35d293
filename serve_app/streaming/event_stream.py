"""A response that is a stream of Server-Sent Events.

The response sits between a surface of `api` and the socket. It sends a ping at regular intervals,
so that proxies keep a quiet connection open, and the notices of the request's streams. It watches
for the client's disconnect, whichever version of ASGI the server speaks. However it ends, it closes
the stream that its events come from.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from serve_app.http.request_record import current_record
from serve_app.streaming.sse import (
    EVENT_STREAM,
    EVENT_STREAM_HEADERS,
    PING,
    SILENT_PING,
    LastEvent,
    encode_comment,
)

PING_INTERVAL_S = 15.0

Sleep = Callable[[float], Awaitable[None]]


def asks_for_events(headers: Headers) -> bool:
    """Return whether a request names event streams in `Accept`, so its client can read them."""
    return EVENT_STREAM in headers.get("accept", "")


class Closeable(Protocol):
    """Something that must be closed, whether or not it was started."""

    async def aclose(self) -> None:
        """Close it; closing twice is harmless."""
        ...


class EventStreamResponse(StreamingResponse):
    """Sends framed events while the client listens.

    Attributes:
        events: The framed events.
        source: The stream that the events are made from. It is closed however the response ends.
            Closing `events` is not enough: a generator that was never started runs no code then.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closeable,
        ping_interval_s: float = PING_INTERVAL_S,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(events, headers=EVENT_STREAM_HEADERS)
        self.events = events
        self.source = source
        self._ping_interval_s = ping_interval_s
        self._sleep = sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves, whichever comes first."""
        send = _one_at_a_time(send)
        ping = PING if asks_for_events(Headers(scope=scope)) else SILENT_PING
        stream = asyncio.ensure_future(self.stream_response(send))
        others: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self.listen_for_disconnect(receive)),
            asyncio.ensure_future(self._send_pings(send, ping)),
        ]
        try:
            with _notices_to(lambda comment: others.append(_sending(send, comment))):
                await asyncio.wait([stream, *others], return_when=asyncio.FIRST_COMPLETED)
            failed = stream.exception() if stream.done() else None
        finally:
            await self._stop(stream, *others)
        if failed is not None:
            raise failed

    async def stream_response(self, send: Send) -> None:
        """Send the events, and the end of the body together with the last one.

        So a client that closes the connection after the last event is not logged as disconnected,
        and its request is already settled.
        """
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for event in self.events:
            is_last = isinstance(event, LastEvent)
            await send({"type": "http.response.body", "body": event, "more_body": not is_last})
            if is_last:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send, ping: bytes) -> None:
        while True:
            await self._sleep(self._ping_interval_s)
            await send({"type": "http.response.body", "body": ping, "more_body": True})

    async def _stop(self, *tasks: asyncio.Future[None]) -> None:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self.source.aclose()
            await self.events.aclose()


@contextmanager
def _notices_to(send: Callable[[bytes], None]) -> Iterator[None]:
    """Pass on the notices of this task's request as comments; those after the block go nowhere.

    Notices are rare, so no stream has a task that waits for them.
    """
    record = current_record()
    if record is None:
        yield
        return
    record.on_notice = lambda notice: send(encode_comment(notice))
    try:
        yield
    finally:
        record.on_notice = lambda notice: None


def _sending(send: Send, comment: bytes) -> asyncio.Future[None]:
    message = {"type": "http.response.body", "body": comment, "more_body": True}
    return asyncio.ensure_future(send(message))


def _one_at_a_time(send: Send) -> Send:
    lock = asyncio.Lock()

    async def locked(message: Message) -> None:
        await lock.acquire()  # for each event: `async with` makes two more coroutines
        try:
            await send(message)
        finally:
            lock.release()

    return locked
