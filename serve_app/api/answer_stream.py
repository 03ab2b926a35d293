"""The order of events in a streamed answer, the same on both of OpenAI's surfaces.

Each choice is opened, then its pieces come as they are ready, those of several choices in between
each other; then the usage, if it was asked for, and `[DONE]`. A failure is an event with the error,
and nothing comes behind it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.errors import RaystreamError
from serve_app.api.answer_schema import StreamOptions
from serve_app.api.errors import error_payload
from serve_app.api.usage import UsageTally
from serve_app.choices import Choices
from serve_app.generation import Piece
from serve_app.sse import DONE, LastEvent, encode_json


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and all its chunks share.

    Attributes:
        id: OpenAI's: `chatcmpl-` or `cmpl-`, then the request's.
        created: Unix seconds.
        model: The name that the client asked for.
        system_fingerprint: See `ModelDescription`.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class ChoiceFramer(Protocol):
    """Makes the choices of a surface's chunks."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return what comes before a choice's first piece, if anything."""
        ...

    def gain(self, piece: Piece) -> list[dict[str, Any]]:
        """Return what a piece adds to its choice: none, one or two chunks' worth."""
        ...


class ChunkWriter:
    """Frames choices as the chunks of one answer, with the usage as it was asked for."""

    def __init__(
        self, head: AnswerHead, object_: str, options: StreamOptions | None, choices: Choices
    ) -> None:
        """Start an answer whose chunks are objects of this name."""
        self._head = {
            "id": head.id,
            "object": object_,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._tally = UsageTally(choices)
        self.has_usage = options is not None and options.include_usage is True
        self._counts_always = (
            self.has_usage and options is not None and options.continuous_usage_stats is True
        )

    def count(self, piece: Piece) -> None:
        """Count a piece of any choice."""
        self._tally.add(piece)

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Return a chunk with one choice."""
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.has_usage:
            chunk["usage"] = self._usage() if self._counts_always else None
        return encode_json(chunk)

    def usage(self) -> bytes:
        """Return the chunk that holds no choice."""
        return encode_json({**self._head, "choices": [], "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return self._tally.usage().model_dump()


async def answer_events(
    choices: Choices, framer: ChoiceFramer, writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    """Yield the framed events of an answer."""
    for index in range(len(choices)):
        opening = framer.opening(index)
        if opening is not None:
            yield writer.chunk(opening)
    try:
        async with aclosing(choices.pieces()) as found:
            async for piece in found:
                writer.count(piece)
                if event := b"".join(map(writer.chunk, framer.gain(piece))):
                    yield event
    except RaystreamError as error:
        yield LastEvent(encode_json(error_payload(error)))
        return
    if writer.has_usage:
        yield writer.usage()
    yield DONE
