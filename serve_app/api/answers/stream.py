"""The order of a streamed answer's parts, the same for all APIs that tell blocks apart."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from deployments.contract.errors import RaystreamError
from deployments.contract.output import TextDelta
from serve_app.backends.streams.choices import Choices
from serve_app.streaming.sse import LastEvent


class AnswerWriter(Protocol):
    """Frames one answer as an API's events."""

    def opening(self) -> bytes:
        """Return the events before the answer's text."""
        ...

    def gain(self, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if it adds nothing yet."""
        ...

    def ending(self) -> bytes:
        """Return the events after a true finish."""
        ...

    def failure(self, error: RaystreamError) -> bytes:
        """Return the events that end a broken answer."""
        ...


async def written_events(choices: Choices, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    """Yield the framed events of the only answer to a request."""
    yield writer.opening()
    try:
        async with aclosing(choices.deltas()) as found:
            async for _, delta in found:
                if events := writer.gain(delta):
                    yield events
    except RaystreamError as error:
        yield LastEvent(writer.failure(error))
        return
    yield LastEvent(writer.ending())
