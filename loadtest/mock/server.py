"""The mock's HTTP server: raystream's and OpenAI's routes, answered by a script."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from loadtest.mock.answer import BrokenOffError, Pace, StreamedAnswer, refuse_or_break
from loadtest.mock.script import Behaviour, Script
from loadtest.mock.surfaces import CLASSIFY_ROUTES, MODEL, STREAMS, Surface, classification

MAX_BODY_BYTES: Final = 64 * 1024 * 1024

Answering = Callable[[web.Request, Behaviour], Awaitable[web.StreamResponse]]


class MockServer:
    """Answers requests according to a script.

    Attributes:
        bodies: The requests' bodies, in order, if `keeps_requests`; for tests.
        headers: The requests' headers, in the same order.
    """

    def __init__(self, script: Script, *, keeps_requests: bool = False) -> None:
        self.bodies: list[object] = []
        self.headers: list[dict[str, str]] = []
        self._script = script
        self._keeps_requests = keeps_requests

    def application(self) -> web.Application:
        """Return the routes."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_get("/v1/models", _models)
        for path, surface in STREAMS.items():
            application.router.add_post(path, self._handler(_streaming(surface)))
        for path in CLASSIFY_ROUTES:
            application.router.add_post(path, self._handler(_classify))
        return application

    def _handler(self, answer: Answering) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            behaviour = self._script.next()
            await self._note(request)
            try:
                refused = await refuse_or_break(request, behaviour.fault)
                return await answer(request, behaviour) if refused is None else refused
            except (BrokenOffError, ConnectionResetError):
                # The client is gone, but aiohttp requires a response.
                return web.Response(status=500)

        return handle

    async def _note(self, request: web.Request) -> None:
        body = await request.json()
        if self._keeps_requests:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))


def _streaming(surface: Surface) -> Answering:
    async def answer(request: web.Request, behaviour: Behaviour) -> web.StreamResponse:
        return await StreamedAnswer(request, surface, behaviour).send()

    return answer


async def _classify(request: web.Request, behaviour: Behaviour) -> web.StreamResponse:
    await Pace(behaviour).content(0)
    return web.json_response(classification())


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


@asynccontextmanager
async def serving(server: MockServer, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the block ends; port 0 takes a free one.

    Yields:
        The port.

    Raises:
        OSError: The port is in use.
    """
    # When a client disconnects, its answer is cancelled, even one that would stay silent forever.
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=4096)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def serve_until(
    stopped: asyncio.Event, server: MockServer, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until the event is set, and announce the URL."""
    async with serving(server, host, port) as bound:
        say(f"The mock is listening on http://{host}:{bound}{next(iter(STREAMS))} until Ctrl-C.")
        await stopped.wait()
