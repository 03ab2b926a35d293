import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.middleware.slow_reader import SlowReaderMiddleware
from tests.serve_app.apps import access_lines
from tests.serve_app.fakes import FakeBackend, FakeStream
from tests.stopped_clock import Clock, settle

DEADLINE_S = 30
BLOCKED_S = 0.2
DELTA = [TextDelta((1,), "x" * 1000)]
MAX_BUFFERED_BYTES = 16 * 2**20
"""Buffers of one connection, in the system and the server; Linux grows a socket to some MiB."""


class PouringStream(FakeStream):
    """Yields deltas as fast as they are read, without end or up to a number."""

    num_taken = 0

    def __init__(self, num_deltas: int | None) -> None:
        super().__init__([], 7)
        self._num_deltas = num_deltas

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        while self._num_deltas is None or self.num_taken < self._num_deltas:
            await asyncio.sleep(0)
            self.num_taken += 1
            yield DELTA
        yield [TextDelta((2,), "end", FinishReason.STOP)]


class PouringBackend(FakeBackend):
    """Answers without end if the prompt asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.endless: list[PouringStream] = []

    async def generate(self, request: GenerationRequest) -> FakeStream:
        if request.prompt != "for ever":
            return PouringStream(2000)
        self.endless.append(PouringStream(None))
        self.opened.set()
        return self.endless[-1]


@asynccontextmanager
async def served(backend: PouringBackend, timeout_s: float | None) -> AsyncIterator[int]:
    """Serve the application on a real socket; yield the port."""
    config = AppConfig.model_validate(
        {
            "models": [{"id": "m", "source": "nowhere"}],
            "limits": {"slow_reader_timeout_s": timeout_s},
        }
    )
    app = build_app(AppParts(config, {"m": backend}))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="off")
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Small buffers, so that a client that does not read blocks the writer soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        listener.listen()
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def silent_client(port: int) -> AsyncIterator[None]:
    """Ask for an endless answer and read nothing of it."""
    body = json.dumps({"prompt": "for ever"}).encode()
    head = (
        "POST /text-generation HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, head.encode() + body)
        yield


async def text_of(port: int) -> str:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
        answer = await client.post("/text-generation", json={"prompt": "some"})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["text"] for event in events[:-1])


@pytest.mark.slow
async def test_a_client_that_stops_reading_loses_only_its_own_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    backend = PouringBackend()
    whole = "x" * 1000 * 2000 + "end"
    async with asyncio.timeout(DEADLINE_S), served(backend, BLOCKED_S) as port, silent_client(port):
        await backend.opened.wait()
        texts = await asyncio.gather(*(text_of(port) for _ in range(3)))
        stream = backend.endless[0]
        await stream.closed.wait()
        assert stream.num_taken * 1000 < MAX_BUFFERED_BYTES
        assert await text_of(port) == whole
    assert texts == [whole] * 3
    assert "slow_reader_timeout_s" in caplog.text
    (line,) = [line for line in access_lines(caplog) if line["error_code"] is not None]
    assert (line["status"], line["finish_reason"]) == (200, "error")
    assert line["error_code"] == "slow_reader_timeout"


async def test_without_a_limit_a_client_that_stops_reading_holds_a_bounded_buffer() -> None:
    backend = PouringBackend()
    async with asyncio.timeout(DEADLINE_S), served(backend, None) as port:
        async with silent_client(port):
            await backend.opened.wait()
            stream = backend.endless[0]
            num_taken = -1
            # While another client reads a complete answer, all buffers have time to fill.
            while num_taken != stream.num_taken:
                num_taken = stream.num_taken
                await text_of(port)
            assert num_taken * 1000 < MAX_BUFFERED_BYTES
            assert not stream.closed.is_set()
        await stream.closed.wait()


async def test_a_client_that_waits_for_the_next_token_is_not_slow(advance: Clock) -> None:
    next_token = asyncio.Event()
    first: Message = {"type": "http.response.body", "body": b"a", "more_body": True}
    last: Message = {"type": "http.response.body", "body": b"b"}
    sent: list[Message] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send(first)
        await next_token.wait()
        await send(last)

    async def receive() -> Message:
        raise AssertionError("nothing more comes")

    async def send(message: Message) -> None:
        sent.append(message)

    answering = asyncio.ensure_future(
        SlowReaderMiddleware(answer, BLOCKED_S)({"type": "http"}, receive, send)
    )
    for _ in range(3):
        await settle()
        advance(BLOCKED_S)
    await settle()
    next_token.set()
    await answering
    assert sent == [first, last]
