"""The ingress's end of the channel, connected to replicas' real servers."""

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from deployments.channel import server
from deployments.channel.server import ChannelServer
from deployments.contract.channel.tls import TlsFiles
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.generation import ChannelAddress
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas import token_channels as module
from serve_app.backends.replicas.stream_box import StreamBox
from serve_app.backends.replicas.token_channels import MAX_NUM_SILENT_TICKS, TokenChannels
from tests.deadline import until
from tests.serve_app.tls_server import certify
from tests.stopped_clock import Clock

FIRST, LAST = TextDelta((1,), "a"), TextDelta((2,), "b", FinishReason.STOP)

pytestmark = pytest.mark.in_time


@pytest.fixture
async def replica() -> AsyncIterator[ChannelServer]:
    made = ChannelServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
async def channels() -> AsyncIterator[TokenChannels]:
    made = TokenChannels({})
    yield made
    await made.aclose()


async def opened(channels: TokenChannels, replica: ChannelServer) -> StreamBox:
    box = channels.open()
    await channels.connect(box, await replica.address())
    return box


async def check_passes(replica: ChannelServer, box: StreamBox, delta: TextDelta) -> None:
    """Check that what the replica sends arrives."""
    with replica.stream(box.key) as stream:
        stream.put(delta)
        replica.flush()
        assert await box.take() == [delta]


def drop_connections(replica: ChannelServer) -> None:
    for connection in list(replica._connections.values()):
        connection.close()


async def test_all_streams_share_one_connection(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    boxes = await asyncio.gather(*(opened(channels, replica) for _ in range(5)))
    assert len(replica._connections) == 1
    for box in boxes:
        await check_passes(replica, box, FIRST)


async def test_deltas_that_arrive_before_the_call_is_accepted_are_kept(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    await opened(channels, replica)
    box = channels.open()
    await check_passes(replica, box, LAST)
    await channels.connect(box, await replica.address())


async def test_one_ingress_reads_from_two_replicas_and_loses_only_one(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    other = ChannelServer("127.0.0.1")
    one, two = await opened(channels, replica), await opened(channels, other)
    with replica.stream(one.key) as to_one, other.stream(two.key) as to_two:
        to_two.put(FIRST)
        other.flush()
        assert await two.take() == [FIRST]
        other.close()
        with pytest.raises(ReplicaUnavailableError):
            await two.take()
        to_one.put(LAST)
        replica.flush()
        assert await one.take() == [LAST]


async def test_all_streams_of_a_lost_replica_fail_at_once_after_what_has_arrived(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    boxes = [await opened(channels, replica) for _ in range(3)]
    with replica.stream(boxes[0].key) as stream:
        stream.put(FIRST)
        replica.flush()
        replica.close()
        assert await boxes[0].take() == [FIRST]
    for box in boxes:
        with pytest.raises(ReplicaUnavailableError):
            await box.take()


async def test_a_stream_that_is_complete_survives_its_replica(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    complete, other = [await opened(channels, replica) for _ in range(2)]
    with replica.stream(complete.key) as stream:
        stream.put(LAST)
        replica.flush()
        replica.close()
    with pytest.raises(ReplicaUnavailableError):
        await other.take()
    assert await complete.take() == [LAST]


async def test_a_stream_whose_deltas_came_through_a_lost_channel_fails(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    first = await opened(channels, replica)
    early = channels.open()
    with replica.stream(early.key) as stream:
        stream.put(FIRST)
        replica.flush()
        assert await early.take() == [FIRST]
        drop_connections(replica)
        with pytest.raises(ReplicaUnavailableError):
            await first.take()
        await channels.connect(early, await replica.address())  # accepted only now
        with pytest.raises(ReplicaUnavailableError):
            await early.take()


async def test_a_replica_that_is_silent_for_too_long_is_lost_and_told_so(
    channels: TokenChannels, replica: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LATE_S", 0.0)
    monkeypatch.setattr(module, "TICK_S", 1000)  # only the test ticks
    box = await opened(channels, replica)
    (opening,) = channels._channels.values()
    channel = opening.result()
    for _ in range(MAX_NUM_SILENT_TICKS):
        channel.tick()
    await check_passes(replica, box, FIRST)  # any message proves life
    for _ in range(MAX_NUM_SILENT_TICKS + 1):
        channel.tick()
    with pytest.raises(ReplicaUnavailableError):
        await box.take()
    await until(lambda: replica.was_given_up)


async def test_after_a_loss_the_next_stream_connects_anew(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    lost = await opened(channels, replica)
    drop_connections(replica)
    with pytest.raises(ReplicaUnavailableError):
        await lost.take()
    box = await opened(channels, replica)
    await check_passes(replica, box, LAST)


async def test_a_replica_that_refuses_or_does_not_listen_is_unavailable(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    address = await replica.address()
    wrong = ChannelAddress(address.host, address.port, b"another secret")
    for _ in range(2):
        with pytest.raises(ReplicaUnavailableError):
            await channels.connect(channels.open(), wrong)
    replica.close()
    with pytest.raises(ReplicaUnavailableError):
        await channels.connect(channels.open(), address)
    assert channels._channels == {}


async def test_a_replica_that_does_not_answer_is_unavailable(
    channels: TokenChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "MAX_NUM_OPENING_TICKS", 1)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(ReplicaUnavailableError):
        await channels.connect(channels.open(), ChannelAddress("127.0.0.1", port, b""))
    silent.close()
    for writer in writers:
        writer.close()


async def test_an_ingress_that_hangs_while_a_channel_opens_does_not_blame_the_replica(
    channels: TokenChannels, replica: ChannelServer, advance: Clock
) -> None:
    opening = asyncio.ensure_future(opened(channels, replica))
    while not channels._channels:  # noqa: ASYNC110 - the task above opens it
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    advance(20)
    await check_passes(replica, await opening, FIRST)


async def test_a_replica_that_answers_nonsense_is_unavailable(channels: TokenChannels) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()  # until the ingress closes
        writer.close()

    strange = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = strange.sockets[0].getsockname()[1]
    with pytest.raises(ReplicaUnavailableError):
        await channels.connect(channels.open(), ChannelAddress("127.0.0.1", port, b""))
    strange.close()


async def test_the_end_of_a_lost_channel_does_not_drop_the_one_that_opens_anew(
    channels: TokenChannels, replica: ChannelServer
) -> None:
    await opened(channels, replica)
    (opening,) = channels._channels.values()
    lost = opening.result()
    lost.abort()
    await lost.closed
    anew = asyncio.ensure_future(opened(channels, replica))
    while not channels._channels:  # noqa: ASYNC110 - the task above opens it
        await asyncio.sleep(0)
    (opening_anew,) = channels._channels.values()
    channels.lose(lost)
    await anew
    assert list(channels._channels.values()) == [opening_anew]


async def test_a_channel_that_is_lost_while_it_opens_is_not_used_again(
    channels: TokenChannels, replica: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = TokenChannels._connect

    async def connect_and_lose(self: TokenChannels, address: ChannelAddress) -> module.Channel:
        channel = await connect(self, address)
        channel.abort()
        await channel.closed
        return channel

    with monkeypatch.context() as patch:
        patch.setattr(TokenChannels, "_connect", connect_and_lose)
        with pytest.raises(ReplicaUnavailableError):
            await opened(channels, replica)
    await opened(channels, replica)


async def test_closing_ends_connections_that_are_still_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TICK_S", 1000)  # silence does not end it
    connected, ended = asyncio.Event(), asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        with suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    silent = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    channels = TokenChannels({})
    connecting = asyncio.ensure_future(
        channels.connect(channels.open(), ChannelAddress("127.0.0.1", port, b""))
    )
    await connected.wait()
    await channels.aclose()
    await ended.wait()
    await asyncio.wait([connecting])
    silent.close()


REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="none")


async def test_a_channel_does_not_inherit_the_context_of_the_request_that_opened_it(
    channels: TokenChannels, replica: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    put = StreamBox.put

    def observed(self: StreamBox, delta: TextDelta) -> None:
        seen.append(REQUEST_ID.get())
        put(self, delta)

    monkeypatch.setattr(StreamBox, "put", observed)
    token = REQUEST_ID.set("first")
    box = await opened(channels, replica)
    with replica.stream(box.key) as stream:
        stream.put(LAST)
        replica.flush()
        await box.take()
    REQUEST_ID.reset(token)
    assert seen == ["none"]


def tls_environment(folder: Path, name: str = "localhost") -> dict[str, str]:
    folder.mkdir()
    certificate, key = certify(folder, name)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(certificate),
    }


async def test_with_ray_s_tls_both_sides_verify_each_other(tmp_path: Path) -> None:
    environment = tls_environment(tmp_path / "cluster")
    replica = ChannelServer("localhost", TlsFiles.of(environment))
    address = await replica.address()
    assert address.uses_tls
    channels = TokenChannels(environment)
    box = channels.open()
    await channels.connect(box, address)
    await check_passes(replica, box, LAST)
    await channels.aclose()
    strange = tls_environment(tmp_path / "strange")
    trusting = strange | {"RAY_TLS_CA_CERT": environment["RAY_TLS_CA_CERT"]}
    for others in (strange, trusting):
        stranger = TokenChannels(others)
        with pytest.raises(ReplicaUnavailableError):
            await stranger.connect(stranger.open(), address)
    replica.close()


async def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    environment = tls_environment(tmp_path / "cluster", "elsewhere")
    replica = ChannelServer("localhost", TlsFiles.of(environment))
    channels = TokenChannels(environment)
    with pytest.raises(ReplicaUnavailableError):
        await channels.connect(channels.open(), await replica.address())
    replica.close()
