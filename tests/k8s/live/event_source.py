"""A server with the shipped streams and middleware, whose events a test sends one by one."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.middleware.server_edge import ServerEdgeMiddleware
from serve_app.streaming.event_stream import PING_INTERVAL_S, EventStreamResponse
from serve_app.streaming.sse import DONE


class EventSource:
    """One stream."""

    def __init__(self, ping_interval_s: float) -> None:
        self.port = 0  # the server's
        self.asked = asyncio.Event()  # set once a request for the stream has arrived
        self._events: asyncio.Queue[bytes] = asyncio.Queue()
        self._ping_interval_s = ping_interval_s

    async def send(self, event: bytes) -> None:
        """Send an event; return once it has been written to the socket."""
        self._events.put_nowait(event)
        await self._events.join()

    def end(self) -> None:
        """Send the last event, with which the server ends the body."""
        self._events.put_nowait(DONE)

    async def stream(self, request: Request) -> Response:
        """Answer with the stream."""
        self.asked.set()
        return EventStreamResponse(self._iterate(), self, self._ping_interval_s)

    async def _iterate(self) -> AsyncGenerator[bytes, None]:
        while True:
            event = await self._events.get()
            yield event
            self._events.task_done()

    async def aclose(self) -> None:
        """Do nothing: no model computes for this stream."""


@asynccontextmanager
async def event_source(ping_interval_s: float = PING_INTERVAL_S) -> AsyncIterator[EventSource]:
    """Serve a stream until the block ends."""
    source = EventSource(ping_interval_s)

    async def answer(request: Request) -> Response:
        return PlainTextResponse("ok")

    app = Starlette(
        routes=[Route("/stream", source.stream, methods=["POST"]), Route("/quick", answer)]
    )
    edge = ServerEdgeMiddleware(app)
    config = uvicorn.Config(edge, log_config=None, timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        source.port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield source
        finally:
            server.should_exit = True
            await serving
