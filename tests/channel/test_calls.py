"""Pooled requests as a replica gets them over a real socket."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from deployments.channel.server import ChannelServer
from deployments.contract.channel.wire import MAX_MESSAGE_BYTES, FrameReader, Hello, encode_hello
from deployments.contract.errors import PoolingFailedError, RaystreamError, ReplicaUnavailableError
from deployments.contract.generation import Refused
from deployments.contract.pooling import Pooled, PooledText, PoolingRequest
from deployments.contract.pooling_wire import (
    GOODBYE,
    MAX_CALL_BYTES,
    CallAnswer,
    decode_answer,
    encode_call,
    encode_departure,
)
from tests.channel.test_server import connected, hello_of, until

pytestmark = pytest.mark.in_time


class Pooler:
    """Answers requests when it is let; each text's row is the text itself."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.error: BaseException | None = None
        self.may_answer = asyncio.Event()

    async def pool(self, request: PoolingRequest) -> Pooled | Refused:
        self.running.append(request.request_id)
        try:
            await self.may_answer.wait()
        finally:
            self.running.remove(request.request_id)
        if self.error is not None:
            raise self.error
        rows = tuple(PooledText(str(text).encode(), 1) for text in request.texts)
        return Pooled(rows, "a")


@pytest.fixture
async def pooler() -> Pooler:
    return Pooler()


@pytest.fixture
async def server(pooler: Pooler) -> AsyncIterator[ChannelServer]:
    made = ChannelServer("127.0.0.1")
    made.take_calls(pooler.pool)
    yield made
    made.close()


class Ingress:
    """A connection that has shown the secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader(MAX_MESSAGE_BYTES)
        self._payloads: list[bytes] = []

    def send(self, *frames: bytes | None) -> None:
        self._writer.write(b"".join(each for each in frames if each is not None))

    async def payload(self) -> bytes:
        while not self._payloads:
            data = await self._reader.read(2**20)
            assert data, "the replica has closed the channel"
            self._payloads += self._frames.feed(data)
        return self._payloads.pop(0)

    async def answer(self) -> tuple[int, CallAnswer]:
        while (payload := await self.payload()) == b"\x90":  # a heartbeat
            pass
        answered = decode_answer(payload)
        assert answered is not None
        return answered

    async def is_closed(self) -> bool:
        with suppress(ConnectionResetError):
            while await self._reader.read(2**16):
                pass
        return True

    def abort(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def ingress_of(server: ChannelServer, name: str = "me") -> AsyncIterator[Ingress]:
    address = await server.address()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    ingress = Ingress(reader, writer)
    ingress.send(encode_hello(Hello(address.secret, name)))
    try:
        yield ingress
    finally:
        ingress.abort()


def call(number: int, *texts: str) -> bytes:
    frame = encode_call(number, PoolingRequest(f"r{number}", texts))
    assert frame is not None
    return frame


async def test_requests_are_answered_together_by_their_numbers(
    server: ChannelServer, pooler: Pooler
) -> None:
    pooler.may_answer.set()
    async with ingress_of(server) as ingress:
        ingress.send(call(7, "one", "two"), call(9, "three"))  # behind the hello, in one write
        answers = dict([await ingress.answer(), await ingress.answer()])
    rows = {
        number: [each.row for each in answer.outcome.texts]
        for number, answer in answers.items()
        if isinstance(answer.outcome, Pooled)
    }
    assert rows == {7: [b"one", b"two"], 9: [b"three"]}


async def test_an_answer_tells_how_many_calls_of_all_ingresses_are_open(
    server: ChannelServer, pooler: Pooler
) -> None:
    async with ingress_of(server, "one") as one, ingress_of(server, "two") as two:
        one.send(call(1, "x"), call(2, "x"))
        two.send(call(1, "x"))
        await until(lambda: len(pooler.running) == 3)
        assert server.calls is not None
        assert server.calls.num_open == 3
        pooler.may_answer.set()
        told = [await one.answer(), await one.answer(), await two.answer()]
    assert sorted(answer.num_calls for _, answer in told) == [0, 1, 2]


async def test_a_request_whose_client_leaves_is_cancelled_and_no_other(
    server: ChannelServer, pooler: Pooler
) -> None:
    async with ingress_of(server) as ingress:
        ingress.send(call(1, "x"), call(2, "y"))
        await until(lambda: len(pooler.running) == 2)
        ingress.send(encode_departure(1), encode_departure(5))  # the latter has its answer
        await until(lambda: pooler.running == ["r2"])
        pooler.may_answer.set()
        assert (await ingress.answer())[0] == 2


async def test_requests_of_a_lost_ingress_are_cancelled(
    server: ChannelServer, pooler: Pooler
) -> None:
    async with ingress_of(server, "lost") as lost, ingress_of(server, "stays") as stays:
        lost.send(call(1, "x"), call(2, "x"))
        stays.send(call(3, "x"))
        await until(lambda: len(pooler.running) == 3)
        lost.abort()
        await until(lambda: pooler.running == ["r3"])
        pooler.may_answer.set()
        assert (await stays.answer())[0] == 3


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PoolingFailedError("failed"), PoolingFailedError("failed")),
        (
            KeyError("a secret of ours"),
            RaystreamError("The model's replica failed at this request."),
        ),
        (
            asyncio.CancelledError(),
            ReplicaUnavailableError("The model's replica has cancelled the request."),
        ),
    ],
)
async def test_an_error_is_told_and_a_failure_is_logged(
    server: ChannelServer,
    pooler: Pooler,
    error: BaseException,
    told: RaystreamError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pooler.may_answer.set()
    pooler.error = error
    with caplog.at_level(logging.ERROR, "ray.serve.raystream.channel"):
        async with ingress_of(server) as ingress:
            ingress.send(call(1, "x"))
            _, answer = await ingress.answer()
    assert type(answer.outcome) is type(told)
    assert str(answer.outcome) == str(told)
    assert ("r1" in caplog.text) == isinstance(error, Exception)


async def test_a_server_that_closes_says_that_open_calls_won_t_be_finished(
    server: ChannelServer, pooler: Pooler
) -> None:
    async with ingress_of(server) as ingress:
        ingress.send(call(1, "x"))
        await until(lambda: len(pooler.running) == 1)
        assert await ingress.payload() == b"\x90"
        server.close()
        assert await ingress.payload() == GOODBYE[4:]
        assert await ingress.is_closed()
        await until(lambda: not pooler.running)


async def test_all_calls_are_waited_for(server: ChannelServer, pooler: Pooler) -> None:
    assert server.calls is not None
    await server.calls.ended()
    async with ingress_of(server) as ingress:
        ingress.send(call(1, "x"), call(2, "x"))
        await until(lambda: len(pooler.running) == 2)
        ended = asyncio.ensure_future(server.calls.ended())
        ingress.send(encode_departure(1))
        await until(lambda: len(pooler.running) == 1)
        assert not ended.done()
        pooler.may_answer.set()
        await ended
        assert (await ingress.answer())[0] == 2


async def test_frames_that_are_malformed_or_too_long_or_repeat_a_number_end_the_connection(
    server: ChannelServer,
) -> None:
    too_long = (MAX_CALL_BYTES + 1).to_bytes(4)
    for frames in (call(1, "x") + call(1, "x"), b"\0\0\0\x01\x81", too_long):
        async with ingress_of(server) as ingress:
            ingress.send(frames)
            assert await ingress.is_closed()
    assert server.calls is not None
    await server.calls.ended()


async def test_a_replica_that_takes_no_calls_and_a_stranger_s_call_end_the_connection(
    server: ChannelServer, pooler: Pooler
) -> None:
    async with connected(await server.address(), call(1, "x")) as stranger:
        assert await stranger.rest() == b""
    generator = ChannelServer("127.0.0.1")
    address = await generator.address()
    async with connected(address, hello_of(address) + call(1, "x")) as peer:
        await peer.rest()
    generator.close()
    assert not pooler.running
