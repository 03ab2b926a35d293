"""Clients that read or send slowly, or vanish, while streams move: nobody else notices."""

import asyncio
import json
import socket
import struct
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.conftest import Memory
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, kill, reached
from tests.measured import Record
from tests.raw_http import head, parsed
from tests.ray.serve_run import Server

TCP_REPAIR = 19
"""Source: linux/tcp.h; the socket then closes without telling its peer."""

MAX_GROWTH_BYTES = 100 * 2**20
LARGE = about("os.stat", **SEEDED, logprobs=True, top_logprobs=20, max_tokens=900)
SMALL = about("os.walk", **SEEDED, max_tokens=600)


async def test_slow_readers_get_all_and_others_do_not_wait_for_them(
    client: httpx.AsyncClient, replicas: Replicas, memory: Memory, record: Record
) -> None:
    large, small = await read(client, LARGE), await read(client, SMALL)
    before = memory.of_the_ingress()
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(opened(client, LARGE)) for _ in range(4)]
        async with opened(client, SMALL) as stream:
            await stream.read_tokens(20)
            kill(replicas.runs_of(stream.answer.request_id)[-1])
            assert_equal([await stream.read_to_end()], [small])
        growth = memory.of_the_ingress() - before
        answers = [await stream.read_to_end() for stream in slow]
    assert_equal(answers, [large] * 4)
    assert growth < MAX_GROWTH_BYTES
    record("growth of the ingress, MiB", round(growth / 2**20, 1))


async def test_a_body_that_arrives_while_streams_move_is_answered(
    client: httpx.AsyncClient, replicas: Replicas, server: Server
) -> None:
    small = await read(client, SMALL)
    body = json.dumps({**SMALL, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head("POST", "/v1/chat/completions", length=len(body)) + body[: len(body) // 2])
    await writer.drain()
    async with opened(client, SMALL) as stream:
        await stream.read_tokens(20)
        kill(replicas.runs_of(stream.answer.request_id)[-1])
        await stream.read_comment("moved")
        writer.write(body[len(body) // 2 :])
        assert_equal([await stream.read_to_end()], [small])
    response, received = parsed(await reader.read(), "POST")
    writer.close()
    answer = Answer("slow body", status=response.status_code)
    for line in received.decode().splitlines():
        answer.take(line)
    assert_equal([answer], [small])


def vanish(connection: socket.socket) -> None:
    """Close a connection without a word, as when a machine loses its power.

    Raises:
        PermissionError: This process may not do that.
    """
    connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, struct.pack("i", 1))
    connection.close()


async def test_a_client_that_vanishes_while_its_stream_moves_frees_its_place(
    client: httpx.AsyncClient, replicas: Replicas, server: Server, record: Record
) -> None:
    small = await read(client, SMALL)
    body = json.dumps({**LARGE, "stream": True, "n": 2}).encode()
    told = head("POST", "/v1/chat/completions", "1.1", b"X-Request-Id: vanishes", length=len(body))
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(told + body)
    await reached(lambda: len(replicas.runs_of("vanishes")) == 2)
    async with opened(client, SMALL) as stream:
        await stream.read_tokens(20)
        kill(replicas.runs_of("vanishes")[-1])
        try:
            vanish(connection)
        except PermissionError:
            pytest.skip("needs CAP_NET_ADMIN")
        assert_equal([await stream.read_to_end()], [small])
    record("until all places were free, s", round(await reached(lambda: replicas.are_idle), 2))
