import asyncio

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from loadtest.stamped_http import Read, StampedBody


def body_and_stream() -> tuple[StampedBody, aiohttp.StreamReader]:
    loop = asyncio.get_running_loop()
    stream = aiohttp.StreamReader(BaseProtocol(loop), limit=2**16, loop=loop)
    return StampedBody(stream, started_s=1.0), stream


async def test_each_piece_keeps_its_time_however_late_it_is_read() -> None:
    body, stream = body_and_stream()
    for time_s, piece in ((2.0, b"a"), (3.0, b"b")):
        stream.feed_data(piece)
        body.collect(time_s)
    assert await body.reads() == [Read(2.0, b"a"), Read(3.0, b"b")]


async def test_a_reader_that_waits_is_woken() -> None:
    body, stream = body_and_stream()
    reading = asyncio.ensure_future(body.reads())
    await asyncio.sleep(0)
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


async def test_what_came_before_a_break_is_not_lost() -> None:
    body, stream = body_and_stream()
    stream.feed_data(b"a")
    body.collect(2.0)
    stream.set_exception(aiohttp.ClientPayloadError("broken"))
    body.collect(3.0)
    assert await body.reads() == [Read(2.0, b"a")]
    with pytest.raises(aiohttp.ClientPayloadError, match="broken"):
        await body.reads()
    assert body.ended_s == 3.0
