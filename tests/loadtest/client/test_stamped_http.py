import asyncio
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol

from loadtest.client.stamped_http import Read, StampedBody, StampedResponse, stamped_session
from tests.stopped_clock import settle


def body_and_stream() -> tuple[StampedBody, aiohttp.StreamReader]:
    loop = asyncio.get_running_loop()
    stream = aiohttp.StreamReader(BaseProtocol(loop), limit=2**16, loop=loop)
    return StampedBody(stream, started_s=1.0), stream


async def test_each_piece_keeps_its_time_however_late_the_reader_is() -> None:
    body, stream = body_and_stream()
    for time_s, piece in ((2.0, b"a"), (3.0, b"b")):
        stream.feed_data(piece)
        body.collect(time_s)
    assert await body.reads() == [Read(2.0, b"a"), Read(3.0, b"b")]


async def test_a_waiting_reader_is_woken() -> None:
    body, stream = body_and_stream()
    reading = asyncio.ensure_future(body.reads())
    await settle()
    stream.feed_data(b"a")
    body.collect(2.0)
    assert await reading == [Read(2.0, b"a")]


async def test_the_end_keeps_the_time_of_its_read() -> None:
    body, stream = body_and_stream()
    stream.feed_data(b"a")
    stream.feed_eof()
    body.collect(2.0)
    body.collect(9.0)
    assert body.ended_s == 2.0
    assert await body.reads() == [Read(2.0, b"a")]
    assert await body.reads() == []


async def test_pieces_before_a_break_are_not_lost() -> None:
    body, stream = body_and_stream()
    stream.feed_data(b"a")
    body.collect(2.0)
    stream.set_exception(aiohttp.ClientPayloadError("broken"))
    body.collect(3.0)
    assert await body.reads() == [Read(2.0, b"a")]
    with pytest.raises(aiohttp.ClientPayloadError, match="broken"):
        await body.reads()
    assert body.ended_s == 3.0


async def test_wrong_framing_ends_the_body_after_the_pieces_before_it() -> None:
    is_read = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await is_read.wait()
        writer.write(b"1\r\nb\r\nnot a length\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with (
        server,
        asyncio.timeout(60),
        stamped_session(time.monotonic) as session,
        session.get(url) as response,
    ):
        assert isinstance(response, StampedResponse)
        assert [read.piece for read in await response.body_reads.reads()] == [b"a"]
        is_read.set()
        assert [read.piece for read in await response.body_reads.reads()] == [b"b"]
        with pytest.raises(aiohttp.ClientPayloadError, match="framing"):
            await response.body_reads.reads()


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_body_larger_than_all_buffers_is_read_completely(is_packed: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if is_packed:
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        for _ in range(4):
            await response.write(b"x" * 1_000_000)
        for _ in range(20_000):
            await response.write(b"y")
        return response

    application = web.Application()
    application.router.add_get("/", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    num_bytes = 0
    async with (
        asyncio.timeout(60),
        stamped_session(time.monotonic) as session,
        session.get(url, headers={"Accept-Encoding": "gzip"}) as response,
    ):
        assert isinstance(response, StampedResponse)
        while reads := await response.body_reads.reads():
            num_bytes += sum(len(read.piece) for read in reads)
    await runner.cleanup()
    assert num_bytes == 4_020_000
