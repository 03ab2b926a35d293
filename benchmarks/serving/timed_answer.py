"""A streamed answer with the time of each line, for runs in which answers wait or are cut short.

Clients share the machine's cores with the server, so lines are only read after the run.
`stream_client` is lighter, and takes whole answers only.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n"


@dataclass(slots=True)
class TimedAnswer:
    """An answer as it arrived; times are of `time.perf_counter`.

    Attributes:
        sent_s: When its request was sent.
        status: The HTTP status; None if none came.
        lines: The lines of events and comments, each with its time.
        ended_s: When the server ended it; None before, and if the run was over first.
    """

    sent_s: float = field(default_factory=time.perf_counter)
    status: int | None = None
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should."""
        return self.status == 200 and any(line == DONE for _, line in self.lines[-1:])

    @property
    def text(self) -> str | None:
        """The text; None if the answer is not whole."""
        if not self.is_whole:
            return None
        found = []
        for _, message in self._messages():
            match message:
                case {"choices": [{"delta": {"content": str(text)}}]}:
                    found.append(text)
        return "".join(found)

    def tokens(self) -> Iterator[tuple[float, int]]:
        """Yield when tokens came, and how many."""
        num_before = 0
        for time_s, message in self._messages():
            match message:
                case {"usage": {"completion_tokens": int(num_tokens)}} if num_tokens > num_before:
                    yield time_s, num_tokens - num_before
                    num_before = num_tokens

    async def receive(self, port: int, body: Mapping[str, Any], *headers: str) -> None:
        """Ask the server on a port for a chat's stream, and keep what comes until it has ended.

        Args:
            port: The server's.
            body: The request, but for what makes a stream of it that counts its tokens.
            headers: Lines of the request's head.
        """
        options = {"include_usage": True, "continuous_usage_stats": True}
        content = json.dumps({**body, "stream": True, "stream_options": options})
        head = (
            "POST /v1/chat/completions HTTP/1.0",
            "Host: 127.0.0.1",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *headers,
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write("\r\n".join((*head, "", content)).encode())
            self.status = int((await reader.readline()).split()[1])
            while line := await reader.readline():
                if line.startswith((b"data: ", b": ")):
                    self.lines.append((time.perf_counter(), line))
        finally:
            writer.close()
        self.ended_s = time.perf_counter()

    def _messages(self) -> Iterator[tuple[float, object]]:
        for time_s, line in self.lines:
            if line.startswith(b"data: {"):
                yield time_s, json.loads(line.removeprefix(b"data: "))
