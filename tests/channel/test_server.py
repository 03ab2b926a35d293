"""The replica's end of the channel, as strangers and ingresses meet it over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from deployments.channel import countdown as countdown_module
from deployments.channel import outbox as outbox_module
from deployments.channel import server as module
from deployments.channel.countdown import TICK_S
from deployments.channel.server import ChannelServer
from deployments.contract.channel.wire import (
    GIVEN_UP,
    MAX_INGRESS_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SILENCE_S,
    Entry,
    FrameReader,
    Hello,
    decode_message,
    encode_go_ahead,
    encode_hello,
    encode_message,
)
from deployments.contract.generation import ChannelAddress, StreamKey
from deployments.contract.output import FinishReason, TextDelta
from tests.stopped_clock import Clock, settle

FIRST, LAST = TextDelta((1,), "a"), TextDelta((2,), "b", FinishReason.STOP)
ABORTED = TextDelta((), "", FinishReason.ABORT)

pytestmark = pytest.mark.in_time


@pytest.fixture
async def server() -> AsyncIterator[ChannelServer]:
    made = ChannelServer("127.0.0.1")
    yield made
    made.close()


class Peer:
    """A connection to a replica, of an ingress or a stranger."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader(MAX_MESSAGE_BYTES)
        self._messages: list[list[Entry]] = []

    async def message(self) -> list[Entry]:
        while not self._messages:
            data = await self._reader.read(2**16)
            assert data, "the replica has closed the channel"
            self._messages += map(decode_message, self._frames.feed(data))
        return self._messages.pop(0)

    async def entries(self) -> list[Entry]:
        """Return the next message that is no heartbeat."""
        while not (entries := await self.message()):
            pass
        return entries

    async def rest(self) -> bytes:
        """Return what comes until the replica closes the connection."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: ChannelAddress, hello: bytes = b"") -> AsyncIterator[Peer]:
    peer = Peer(*await asyncio.open_connection(address.host, address.port))
    peer.writer.write(hello)
    try:
        yield peer
    finally:
        await peer.close()


def hello_of(address: ChannelAddress, name: str = "me") -> bytes:
    return encode_hello(Hello(address.secret, name))


@asynccontextmanager
async def ingress_of(server: ChannelServer) -> AsyncIterator[Peer]:
    """Connect an ingress, and read the answer to its hello."""
    address = await server.address()
    async with connected(address, hello_of(address)) as peer:
        assert await peer.message() == []
        yield peer


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the server tells nobody of these changes
        await asyncio.sleep(0)


async def test_a_server_that_could_not_listen_tries_again(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server, "_host", "192.0.2.1")  # no address of this machine
        with pytest.raises(OSError, match="assign"):
            await server.address()
    assert (await server.address()).port


async def test_two_ingresses_get_their_own_streams(server: ChannelServer) -> None:
    address = await server.address()
    async with (
        connected(address, hello_of(address, "one")) as one,
        connected(address, hello_of(address, "two")) as two,
    ):
        with server.stream(StreamKey("one", 7)) as to_one, server.stream(StreamKey("two", 7)) as to:
            to_one.put(FIRST)
            to.put(LAST)
            server.flush()
            assert await one.entries() == [(7, FIRST)]
            assert await two.entries() == [(7, LAST)]
            await to.wait_until_ended()
        assert await one.entries() == [(7, ABORTED)]


async def test_an_ingress_may_connect_after_the_last_delta(server: ChannelServer) -> None:
    address = await server.address()
    with server.stream(StreamKey("me", 1)) as stream:
        stream.put(FIRST)
        stream.put(LAST)
        server.flush()
        async with connected(address, hello_of(address)) as peer:
            assert await peer.message() == [], "the answer to the hello"
            assert await peer.message() == [(1, TextDelta.join([FIRST, LAST]))]
            await stream.wait_until_ended()


@pytest.mark.parametrize(
    "hello",
    [
        encode_hello(Hello(b"\0" * 16, "me")),
        encode_hello(Hello(b"", "me")),
        b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n",
        b"\0\0\0\x01\xc1",
        (MAX_INGRESS_BYTES + 1).to_bytes(4),
        encode_message([(1, LAST)]),
    ],
    ids=["wrong secret", "no secret", "http", "garbage", "oversized", "message"],
)
async def test_a_stranger_is_closed_without_a_byte(server: ChannelServer, hello: bytes) -> None:
    address = await server.address()
    with server.stream(StreamKey("me", 1)) as stream:
        stream.put(FIRST)
        async with connected(address, hello) as stranger:
            assert await stranger.rest() == b""
        async with connected(address, hello_of(address)) as peer:
            assert await peer.entries() == [(1, FIRST)]
    await until(lambda: server.num_strangers == 0)


async def test_a_stranger_that_says_nothing_is_closed(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(countdown_module, "TICK_S", 0.0)
    async with connected(await server.address(), b"\0\0") as stranger:
        assert await stranger.rest() == b""


async def test_an_ingress_whose_hello_comes_after_the_replica_has_stood_still_is_connected(
    server: ChannelServer, advance: Clock
) -> None:
    address = await server.address()
    async with connected(address) as peer:
        await until(lambda: server.num_strangers == 1)
        advance(3600)
        await settle()
        peer.writer.write(hello_of(address))
        assert await peer.message() == []


async def test_only_some_strangers_may_be_connected(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NUM_STRANGERS", 2)
    address = await server.address()
    async with connected(address), connected(address):
        await until(lambda: server.num_strangers == 2)
        async with connected(address) as third:
            assert await third.rest() == b""
        await until(lambda: server.num_strangers == 2)
    await until(lambda: server.num_strangers == 0)
    async with connected(address, hello_of(address)) as peer:
        assert await peer.message() == []
        assert server.num_strangers == 0


async def test_an_ingress_gives_go_aheads(server: ChannelServer) -> None:
    address = await server.address()
    with server.go_aheads.expect() as one, server.go_aheads.expect() as other:
        unknown = other.number + 1
        given = b"".join(map(encode_go_ahead, (unknown, one.number, one.number)))
        async with connected(address, hello_of(address) + given) as peer:
            assert await one.is_given()
            assert not other._given.done()
            peer.writer.write(encode_go_ahead(other.number))
            assert await other.is_given()


async def test_a_stranger_gives_no_go_ahead(server: ChannelServer) -> None:
    address = await server.address()
    with server.go_aheads.expect() as suspect:
        async with connected(address, encode_go_ahead(suspect.number)) as stranger:
            assert await stranger.rest() == b""
        assert not suspect._given.done()


@pytest.mark.parametrize(
    "extra", ["hello", b"\0\0\0\x01\xc1", (MAX_INGRESS_BYTES + 1).to_bytes(4)], ids=repr
)
async def test_an_ingress_that_sends_anything_else_is_closed(
    server: ChannelServer, extra: str | bytes
) -> None:
    address = await server.address()
    hello = hello_of(address)
    async with connected(address, hello + (hello if isinstance(extra, str) else extra)) as peer:
        with server.stream(StreamKey("me", 1)) as stream:
            await peer.rest()
            stream.put(FIRST)
            await stream.wait_until_ended()


@pytest.mark.parametrize("beats_first", [True, False])
async def test_a_replica_that_hung_until_an_ingress_gave_it_up_knows_that(
    server: ChannelServer, advance: Clock, beats_first: bool
) -> None:
    async with ingress_of(server) as peer:
        advance(MAX_SILENCE_S)
        if beats_first:
            await settle()
        peer.writer.write(GIVEN_UP)
    await until(lambda: not server._connections)
    assert server.was_given_up


async def test_a_replica_that_hung_is_sound_if_its_ingress_only_leaves(
    server: ChannelServer, advance: Clock
) -> None:
    async with ingress_of(server):
        advance(MAX_SILENCE_S)
    await until(lambda: not server._connections)
    assert not server.was_given_up


async def test_a_replica_that_did_not_hang_is_sound_although_an_ingress_gave_it_up(
    server: ChannelServer, advance: Clock
) -> None:
    async with ingress_of(server) as peer:
        for seconds in (MAX_SILENCE_S, module.HEARTBEAT_S):
            advance(seconds)
            await settle()
        assert await peer.message() == []
        peer.writer.write(GIVEN_UP)
    await until(lambda: not server._connections)
    assert not server.was_given_up, "the network had cut it off"


async def test_a_silent_channel_gets_heartbeats(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.0)
    address = await server.address()
    async with connected(address, hello_of(address)) as peer:
        assert [await peer.message() for _ in range(5)] == [[]] * 5


async def test_streams_of_a_lost_ingress_end(server: ChannelServer) -> None:
    async with ingress_of(server) as peer:
        with server.stream(StreamKey("me", 1)) as stream:
            await peer.close()
            await stream.wait_until_ended()
            assert not stream.is_delivered


async def test_a_second_connection_of_an_ingress_replaces_the_first(server: ChannelServer) -> None:
    address = await server.address()
    async with connected(address, hello_of(address)) as first:
        await first.message()
        with server.stream(StreamKey("me", 1)) as old:
            async with connected(address, hello_of(address)) as second:
                assert await second.entries() == [(1, ABORTED)]
                await old.wait_until_ended()
                assert await first.rest() == b""
                with server.stream(StreamKey("me", 2)) as new:
                    new.put(FIRST)
                    server.flush()
                    assert (2, FIRST) in await second.entries()


async def test_streams_of_an_ingress_that_never_connects_end(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(countdown_module, "TICK_S", 0.0)
    with server.stream(StreamKey("nobody", 1)) as stream:
        stream.put(FIRST)
        await stream.wait_until_ended()
        assert not stream.is_delivered
    assert server._outboxes == {}


async def test_an_ingress_whose_channel_breaks_has_the_whole_time_to_come_again(
    server: ChannelServer, advance: Clock
) -> None:
    async def tick(num_ticks: int) -> None:
        for _ in range(num_ticks):
            advance(TICK_S)
            await settle()

    address = await server.address()
    with server.stream(StreamKey("me", 1)):
        await tick(module.MAX_NUM_CONNECT_TICKS - 1)
        async with connected(address, hello_of(address)) as peer:
            await peer.message()
    await until(lambda: not server._connections)
    with server.stream(StreamKey("me", 2)) as stream:
        ended = asyncio.ensure_future(stream.wait_until_ended())
        await tick(module.MAX_NUM_CONNECT_TICKS - 1)
        assert not ended.done()
        await tick(1)
        await ended


async def test_an_ingress_that_connects_after_the_replica_has_stood_still_gets_its_stream(
    server: ChannelServer, advance: Clock
) -> None:
    address = await server.address()
    with server.stream(StreamKey("me", 1)) as stream:
        stream.put(LAST)
        server.flush()
        advance(3600)
        await settle()
        async with connected(address, hello_of(address)) as peer:
            assert await peer.entries() == [(1, LAST)]
            await stream.wait_until_ended()
            assert stream.is_delivered


async def test_an_ingress_that_does_not_read_makes_deltas_gather_and_gets_all(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MIN_INTERVAL_S", 0.0)
    address = await server.address()
    sent = TextDelta((1,) * 1000, "x" * 20_000)
    async with connected(address, hello_of(address)) as peer:
        await peer.message()
        with server.stream(StreamKey("me", 1)) as stream:
            num_sent = 0
            outbox = server._outboxes["me"]
            while not outbox.is_paused:
                stream.put(sent)
                server.flush()
                num_sent += 1
                await asyncio.sleep(0)
            for _ in range(10):
                stream.put(sent)
                server.flush()
            assert len(outbox._gathered[1]) == 10
            stream.put(LAST)
            server.flush()
            assert not stream.is_delivered
            text = ""
            while not stream.is_delivered:
                text += "".join(delta.text for _, delta in await peer.entries())
            while len(text) < (num_sent + 10) * 20_000 + 1:
                text += "".join(delta.text for _, delta in await peer.entries())
    assert text == "x" * ((num_sent + 10) * 20_000) + "b"


async def test_what_was_sent_arrives_before_the_server_closes(server: ChannelServer) -> None:
    async with ingress_of(server) as peer:
        with server.stream(StreamKey("me", 1)) as stream:
            stream.put(LAST)
            server.flush()
            server.close()
            assert await peer.entries() == [(1, LAST)]
            assert await peer.rest() == b""
