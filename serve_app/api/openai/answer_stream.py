"""The order of events in a streamed answer, the same for chat completions and completions.

Every choice is opened; then the deltas of all choices come as they are ready, interleaved; then the
usage, if the request asks for it, and `[DONE]`. After a failure, the last event holds the error.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Self

from deployments.contract import TextDelta
from deployments.errors import RaystreamError
from serve_app.api.openai.answer_schema import StreamOptions
from serve_app.api.openai.usage import UsageTally
from serve_app.api.reasoning.separation import Separation
from serve_app.backends.choices import Choices
from serve_app.clock import Clock
from serve_app.http.errors import error_payload
from serve_app.streaming.sse import DONE, LastEvent, encode_json


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that an answer and all its chunks share.

    Attributes:
        id: `chatcmpl-` or `cmpl-`, as in OpenAI's API, then the request's id.
        created: Unix seconds.
        model: The name in the client's request.
        system_fingerprint: See `ModelDescription`.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    @classmethod
    def begin(cls, answer_id: str, asked_for: str, choices: Choices, clock: Clock) -> Self:
        """Return the head of an answer that begins now."""
        return cls(answer_id, int(clock.unix_s()), asked_for, choices.fingerprint)


class ChoiceFramer(Protocol):
    """Makes the choices of a surface's chunks."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a chunk before the first delta, or None."""
        ...

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return what a delta adds to its choice, as the choices of zero or more chunks."""
        ...


class ChunkWriter:
    """Frames choices as the chunks of one answer, with the usage that the request asks for."""

    def __init__(
        self,
        head: AnswerHead,
        object_: str,
        options: StreamOptions | None,
        choices: Choices,
        reasoning: Separation | None = None,
    ) -> None:
        """Start an answer.

        Args:
            head: The fields that all chunks share.
            object_: The chunks' `object`.
            options: Whether chunks hold the usage, and which chunks.
            choices: The streams, whose prompts count in the usage.
            reasoning: How the reasoning is separated, which the usage counts; None if it is not.
        """
        self._head = {
            "id": head.id,
            "object": object_,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._tally = UsageTally(choices, reasoning)
        self.has_usage = options is not None and options.include_usage is True
        self._counts_always = (
            self.has_usage and options is not None and options.continuous_usage_stats is True
        )

    def count(self, index: int, delta: TextDelta) -> None:
        """Count a delta of any choice."""
        self._tally.add(index, delta)

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Return a chunk with one choice."""
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.has_usage:
            chunk["usage"] = self._usage() if self._counts_always else None
        return encode_json(chunk)

    def usage(self) -> bytes:
        """Return the chunk with the usage and no choice."""
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
        async with aclosing(choices.deltas()) as found:
            async for index, delta in found:
                writer.count(index, delta)
                if event := b"".join(map(writer.chunk, framer.gain(index, delta))):
                    yield event
    except RaystreamError as error:
        yield LastEvent(encode_json(error_payload(error)))
        return
    if writer.has_usage:
        yield writer.usage()
    yield DONE
