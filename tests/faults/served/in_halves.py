"""A request whose body arrives in two halves."""

import asyncio
import json
from dataclasses import dataclass
from typing import Self

from tests.faults.served.answer import COUNTED, Answer
from tests.faults.served.kinds import Body
from tests.raw_http import LOCALHOST, head, parsed

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class InHalves:
    """Its connection, and the half of the body that has not been sent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rest: bytes

    @classmethod
    async def begun(cls, port: int, body: Body) -> Self:
        """Send the head and the first half of the body."""
        whole = json.dumps({**body, "stream": True, "stream_options": COUNTED}).encode()
        half = len(whole) // 2
        reader, writer = await asyncio.open_connection(LOCALHOST, port)
        writer.write(head("POST", CHAT, length=len(whole)) + whole[:half])
        await writer.drain()
        return cls(reader, writer, whole[half:])

    async def send_the_rest(self) -> None:
        """Send the other half."""
        self.writer.write(self.rest)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """Return the answer, once it has ended."""
        response, received = parsed(await self.reader.read(), "POST")
        self.writer.close()
        answer = Answer("in halves", status=response.status_code)
        for line in received.decode().splitlines():
            answer.take(line)
        return answer
