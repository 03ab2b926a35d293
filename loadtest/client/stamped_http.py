"""aiohttp with a time stamp for each read of a socket.

aiohttp wakes the reader of a body one turn of the event loop after the bytes arrived, and merges
all bytes that arrived in between. The connections here take the time before anything is parsed and
empty the body's buffer at once. So each part of a body keeps the time of its own read, however late
the reader is, and no part is lost if the connection then breaks.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection

from loadtest.client.clock import Clock

_ConnectionMaker = Callable[..., ResponseHandler]

KEEPALIVE_S: Final = 4.0
"""How long an idle connection is kept for reuse. Uvicorn and Node close theirs after five seconds;
a shorter time here means that requests rarely meet a connection that is just closing."""


class Read(NamedTuple):
    """A piece of a body and the time it was read from the socket."""

    time_s: float
    piece: bytes


class StampedBody:
    """A response's body as it arrives.

    Attributes:
        started_s: When the headers arrived.
        ended_s: When the body ended or broke off; None before that.
    """

    def __init__(self, stream: aiohttp.StreamReader, started_s: float) -> None:
        """Take over a stream that has not been read from."""
        self.started_s = started_s
        self.ended_s: float | None = None
        self._stream = stream
        self._num_taken = 0
        self._broken: BaseException | None = None
        self._reads: list[Read] = []
        self._waiter: asyncio.Future[None] | None = None

    def collect(self, now_s: float) -> None:
        """Take the bytes that the parser has put into the stream; they were read at this time."""
        if self.ended_s is not None:
            return
        # Emptying the stream resumes the parser, which may fill the stream again.
        while self._num_taken < self._stream.total_bytes and self._stream.exception() is None:
            piece = self._stream.read_nowait()
            self._num_taken += len(piece)
            self._reads.append(Read(now_s, piece))
        if self._stream.is_eof() or self._stream.exception() is not None:
            self.ended_s = now_s
        self._wake()

    def break_off(self, now_s: float, reason: BaseException) -> None:
        """End a body that violates the protocol, unless it has already ended.

        aiohttp reports the error to the connection but, for wrong chunks, not to the body's reader.
        """
        if self.ended_s is None:
            self.ended_s = now_s
            self._broken = aiohttp.ClientPayloadError(f"Wrong framing: {reason}")
            self._broken.__cause__ = reason
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def reads(self) -> list[Read]:
        """Wait for pieces; return an empty list at the end.

        Raises:
            aiohttp.ClientError: The body broke off or violates the protocol; all pieces before that
                have been returned.
        """
        while not self._reads and self.ended_s is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        reads, self._reads = self._reads, []
        broken = self._stream.exception() or self._broken
        if not reads and broken is not None:
            raise broken
        return reads


class StampedConnection(ResponseHandler):
    """An aiohttp connection that takes the time when bytes arrive.

    Attributes:
        body: The body of the latest response on this connection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        super().__init__(loop=loop)
        self.body: StampedBody | None = None
        self._clock = clock
        self._now_s = 0.0
        self._is_compressed = False

    def data_received(self, data: bytes) -> None:
        """Take the time, then parse."""
        if not data:
            # Nothing was read: aiohttp resumes its parser this way after the stream was emptied.
            super().data_received(data)
            return
        self._now_s = now_s = self._clock()
        super().data_received(data)
        if self.body is not None:
            self.body.collect(now_s)
            if (error := self.exception()) is not None:
                self.body.break_off(now_s, error)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Start a response's body; aiohttp calls this with its headers."""
        message, stream = data
        self._is_compressed = message.compression is not None
        self.body = StampedBody(stream, self._now_s)
        super().feed_data(data, size)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading only if it was paused.

        aiohttp calls this whenever a body's buffer is emptied, which happens here with every event.
        Only a parser that was paused, or that decompresses, has anything left to parse.
        """
        if self._reading_paused or self._is_compressed:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Take the time; a body without a length ends with its connection."""
        now_s = self._clock()
        super().connection_lost(exc)
        if self.body is not None:
            self.body.collect(now_s)


class StampedResponse(aiohttp.ClientResponse):
    """A response whose body is read only through `body_reads`."""

    body_reads: StampedBody

    async def start(self, connection: Connection) -> Self:
        """Wait for the headers."""
        protocol = connection.protocol
        await super().start(connection)
        assert isinstance(protocol, StampedConnection)
        assert protocol.body is not None
        self.body_reads = protocol.body
        return self


class StampedConnector(aiohttp.TCPConnector):
    """Opens any number of connections, each a `StampedConnection`."""

    def __init__(self, clock: Clock) -> None:
        """Bind to the running event loop."""
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S)
        # aiohttp has no public way to set this; tests fail if the attribute goes.
        make: _ConnectionMaker = StampedConnection
        self._factory = partial(make, self._loop, clock)


def stamped_session(clock: Clock) -> aiohttp.ClientSession:
    """Return a session without timeouts and cookies."""
    return aiohttp.ClientSession(
        connector=StampedConnector(clock),
        response_class=StampedResponse,
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
    )
