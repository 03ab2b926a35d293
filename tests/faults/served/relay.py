"""A relay between a client and a server, which shows what the client asks and is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.raw_http import LOCALHOST

READ_BYTES = 2**16
END = b"\r\n\r\n"
EXTENSIONS = b"sec-websocket-extensions:"
"""Left out of the handshake of a WebSocket: its frames would be compressed."""


@dataclass
class Relay:
    """What has passed.

    Attributes:
        url: The relay's address, for the client.
        asked: The first line of each connection, which begins with a whole head.
        sent: All that the server has sent.
    """

    url: str
    asked: list[str] = field(default_factory=list)
    sent: bytearray = field(default_factory=bytearray)


@asynccontextmanager
async def relaying(server_url: str) -> AsyncIterator[Relay]:
    """Pass on what comes to an address of its own."""
    to = urlsplit(server_url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(END)).splitlines(keepends=True)
        relay.asked.append(head[0].decode("latin-1").strip())
        back, onward = await asyncio.open_connection(to.hostname, to.port)
        onward.writelines(line for line in head if not line.lower().startswith(EXTENSIONS))
        await asyncio.gather(_pass_on(reader, onward), _pass_on(back, writer, relay.sent))

    async with await asyncio.start_server(serve, LOCALHOST, 0) as listener:
        relay = Relay(f"http://{LOCALHOST}:{listener.sockets[0].getsockname()[1]}")
        yield relay


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None = None
) -> None:
    """Pass on what is read until its end."""
    with suppress(ConnectionError):  # either side may leave
        while data := await reader.read(READ_BYTES):
            if kept is not None:
                kept += data
            writer.write(data)
            await writer.drain()
    writer.close()
