"""Transports of clients into an application that runs on an event loop of its own.

`httpx2.ASGITransport` serves only coroutines, and hands a body over once it is complete. These
serve blocking clients, and clients of any event loop, and hand over each piece when it is sent. A
client that closes its answer early disconnects.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from queue import Empty, SimpleQueue

import httpx
import httpx2
from anyio import to_thread
from anyio.from_thread import BlockingPortal
from starlette.types import ASGIApp, Message

SPEC_VERSION = "2.3"
"""uvicorn's: the application listens for the disconnect itself."""
MAX_SILENCE_S = 60.0


class AppTransport(httpx2.BaseTransport):
    """Sends requests to an application on the event loop of a portal."""

    def __init__(self, app: ASGIApp, portal: BlockingPortal) -> None:
        self._app = app
        self._portal = portal

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer when it has begun."""
        answer = _Answer(self._app, request, self._portal)
        start = answer.next_message()
        assert start is not None, "the application ended without an answer"
        return httpx2.Response(start["status"], headers=start["headers"], stream=answer)


class AsyncAppTransport(httpx2.AsyncBaseTransport):
    """The same for coroutines of any event loop."""

    def __init__(self, app: ASGIApp, portal: BlockingPortal) -> None:
        self._transport = AppTransport(app, portal)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer when it has begun."""
        await request.aread()
        answer = await to_thread.run_sync(self._transport.handle_request, request)
        assert isinstance(answer.stream, _Answer)
        stream = _AsyncAnswer(answer.stream)
        return httpx2.Response(answer.status_code, headers=answer.headers, stream=stream)


class WholeAnswers(httpx.BaseTransport):
    """The same for clients that still use httpx; each answer is handed over whole."""

    def __init__(self, app: ASGIApp, portal: BlockingPortal) -> None:
        self._transport = AppTransport(app, portal)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer when it has ended."""
        asked = httpx2.Request(
            request.method, str(request.url), headers=request.headers.raw, content=request.read()
        )
        answer = self._transport.handle_request(asked)
        return httpx.Response(answer.status_code, headers=answer.headers.raw, content=answer.read())


class _Answer(httpx2.SyncByteStream):
    """One call of the application, and the body that it sends."""

    def __init__(self, app: ASGIApp, request: httpx2.Request, portal: BlockingPortal) -> None:
        self._scope = _scope_of(request)
        self._body: bytes | None = request.read()
        self._max_silence_s = request.extensions.get("timeout", {}).get("read") or MAX_SILENCE_S
        self._portal = portal
        self._left = asyncio.Event()
        self._sent: SimpleQueue[Message | None] = SimpleQueue()
        self._call = portal.start_task_soon(self._run, app)

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self._sent.put(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent.put(message)

    def next_message(self) -> Message | None:
        """Return the next message when it is sent; None if the application has ended.

        Raises:
            httpx2.ReadTimeout: It sends nothing for too long.
            Exception: What the application has raised.
        """
        try:
            message = self._sent.get(timeout=self._max_silence_s)
        except Empty:
            raise httpx2.ReadTimeout("the application sends nothing") from None
        if message is None:
            self._call.result()
        return message

    def __iter__(self) -> Iterator[bytes]:
        while True:
            message = self.next_message()
            if message is None:
                raise httpx2.RemoteProtocolError("the application ended before its answer")
            if body := message.get("body"):
                yield body
            if not message.get("more_body", False):
                return

    def close(self) -> None:
        """Disconnect; the application may have ended."""
        self._portal.call(self._left.set)


class _AsyncAnswer(httpx2.AsyncByteStream):
    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._pieces = iter(answer)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await to_thread.run_sync(next, self._pieces, None)) is not None:
            yield piece

    async def aclose(self) -> None:
        await to_thread.run_sync(self._answer.close)


def _scope_of(request: httpx2.Request) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": SPEC_VERSION},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 1),
    }
