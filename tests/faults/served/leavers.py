"""Clients that leave their streams at any moment, or vanish."""

import asyncio
import json
import socket
import struct
from contextlib import suppress

import httpx

from tests.faults.served.answer import opened, read
from tests.faults.served.in_halves import CHAT
from tests.faults.served.kinds import SEEDED, about
from tests.raw_http import LOCALHOST, head

BODY = about("os.walk", **SEEDED, max_tokens=900)
TCP_REPAIR = 19
"""Source: linux/tcp.h; the socket then closes without telling its peer."""


async def leave_after(client: httpx.AsyncClient, num_tokens: int) -> None:
    """Open a stream and leave it after some tokens; with 0, before it is accepted."""
    if num_tokens == 0:
        asked = asyncio.create_task(read(client, BODY))
        await asyncio.sleep(0)
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        return
    async with opened(client, BODY) as stream:
        assert stream.answer.status == 200
        await stream.read_tokens(num_tokens)


def asked(port: int, request_id: str) -> socket.socket:
    """Ask for two long answers in one request; return the connection."""
    body = json.dumps({**BODY, "stream": True, "n": 2}).encode()
    name = f"X-Request-Id: {request_id}".encode()
    connection = socket.create_connection((LOCALHOST, port))
    connection.sendall(head("POST", CHAT, "1.1", name, length=len(body)) + body)
    return connection


def vanish(connection: socket.socket) -> None:
    """Close a connection without a word, as when a machine loses its power.

    Raises:
        PermissionError: This process may not do that.
    """
    connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, struct.pack("i", 1))
    connection.close()
