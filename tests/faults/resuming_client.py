"""A client that goes on with its stream after each disconnect."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.faults.served.answer import COUNTED, Answer

PATH = "/v1/chat/completions"
MAX_ATTEMPTS = 600
PAUSE_S = 0.1
UNREACHABLE = (502, 503)
"""HAProxy's answers while it still sends requests to an ingress that is dead."""


class ResumingClient:
    """Reads one answer, however often its connection breaks."""

    def __init__(
        self, client: httpx.AsyncClient, body: Mapping[str, Any], url: Callable[[], str]
    ) -> None:
        """Prepare to ask; `url` returns the address of an ingress, another one for each attempt."""
        self.answer = Answer("")  # what has come, over all attempts
        self.num_resumed = 0  # how often a stream has gone on behind an event
        self._client = client
        self._body = {"stream": True, "stream_options": COUNTED, **body}
        self._url = url
        self._has_gained = asyncio.Condition()
        self._has_ended = False

    async def read(self) -> Answer:
        """Read to the end."""
        try:
            for _ in range(MAX_ATTEMPTS):
                try:
                    await self._attempt()
                except httpx.TransportError:
                    # Another process must have seen that the ingress is dead, or started one.
                    await asyncio.sleep(PAUSE_S)
                if self.answer.num_done or self.answer.error:
                    return self.answer
            raise AssertionError(f"no end after {MAX_ATTEMPTS} attempts")
        finally:
            self._has_ended = True
            async with self._has_gained:
                self._has_gained.notify_all()

    async def _attempt(self) -> None:
        answer = self.answer
        headers = {"Accept": "text/event-stream", "Last-Event-ID": answer.last_event_id}
        async with self._client.stream(
            "POST", self._url() + PATH, json=self._body, headers=headers
        ) as response:
            if response.status_code in UNREACHABLE:
                raise httpx.ReadError("no ingress")
            answer.status = response.status_code
            assert answer.status == 200, await response.aread()
            self.num_resumed += bool(answer.last_event_id)
            async for line in response.aiter_lines():
                answer.take(line)
                async with self._has_gained:
                    self._has_gained.notify_all()

    async def wait_for(self, num_tokens: int) -> None:
        """Wait until this many tokens have come, or the reader has ended."""
        async with self._has_gained:
            await self._has_gained.wait_for(
                lambda: self.answer.num_tokens >= num_tokens or self._has_ended
            )


def essence(answer: Answer) -> object:
    """Return all that must be as if the stream had never broken; ids and times differ."""
    assert answer.is_whole, (answer.error, answer.num_done)
    assert answer.usage is not None
    return dict(answer.choices), answer.usage["completion_tokens"]
