"""A light client of streamed answers: it notes when bytes arrive, and reads them after the run.

Client and server share the machine's cores in a benchmark, so the client does next to nothing while
the server works.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

END = b"\r\n0\r\n\r\n"
"""The end of a body in chunks."""

DEADLINE_S = 300


@dataclass(slots=True)
class Answer:
    """A streamed answer as it arrived.

    Attributes:
        sent_s: When the request was sent.
        reads: The bytes of each read, and its time.
    """

    sent_s: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    def messages(self) -> Iterator[tuple[float, dict[str, object]]]:
        """Yield each event's JSON and the time at which its last byte was read.

        Raises:
            RuntimeError: The request was refused, or the answer has an error or no end.
        """
        raw = b"".join(data for _, data in self.reads)
        head, _, body = raw.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in body:
            raise RuntimeError(raw[-500:].decode())
        start, offset, reads = 0, 0, iter(self.reads)
        time_s = 0.0
        while (start := raw.find(b"data: {", start)) >= 0:
            end = raw.index(b"\n", start)
            while offset <= end:
                time_s, data = next(reads)
                offset += len(data)
            message = json.loads(raw[start + len(b"data: ") : end])
            if "error" in message:
                raise RuntimeError(message["error"])
            yield time_s, message
            start = end


class Connection(asyncio.Protocol):
    """One connection, which carries one answer at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answer = Answer()
        self._is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note the time, and whether the answer ends here."""
        self.answer.reads.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END and not self._is_done.done():
            self._is_done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer where it is."""
        if not self._is_done.done():
            self._is_done.set_result(None)

    async def ask(self, request: bytes) -> Answer:
        """Send a request and wait for the end of its answer."""
        self.answer, self._tail = Answer(), b""
        self._is_done = asyncio.get_running_loop().create_future()
        self.answer.sent_s = time.perf_counter()
        self.transport.write(request)
        async with asyncio.timeout(DEADLINE_S):
            await self._is_done
        return self.answer


async def closed_loop(port: int, requests: Sequence[bytes], num_streams: int) -> list[Answer]:
    """Send all requests, each stream its next one as soon as its last answer has ended."""
    left = iter(requests)
    answers: list[Answer] = []
    await asyncio.gather(*(_stream(port, left, answers) for _ in range(num_streams)))
    return answers


async def _stream(port: int, requests: Iterable[bytes], answers: list[Answer]) -> None:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    for request in requests:
        if connection.transport.is_closing():  # HAProxy closes idle connections when it reloads
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        answers.append(await connection.ask(request))
    connection.transport.close()
