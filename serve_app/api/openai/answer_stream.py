"""The order of events in a streamed answer, the same for chat completions and completions.

Every choice is opened; then the deltas of all choices come as they are ready, interleaved; then the
usage, if the request asks for it, and `[DONE]`. After a failure, the last event holds the error; it
has no id, so a client may resume behind the event before it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from deployments.contract.errors import RaystreamError
from deployments.contract.output import TextDelta
from serve_app.api.openai.answer_schema import StreamOptions
from serve_app.api.openai.resumption import ChoiceFramer, ResumableAnswer
from serve_app.api.openai.usage import UsageTally
from serve_app.api.reasoning.separation import Separation
from serve_app.backends.streams.choices import Choices
from serve_app.clock import Clock
from serve_app.streaming.error_event import error_event
from serve_app.streaming.event_id import Mark
from serve_app.streaming.sse import DONE, LastEvent, encode_json


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that an answer and all its chunks share.

    Attributes:
        id: `chatcmpl-` or `cmpl-`, as in OpenAI's API, then the request's id.
        created: Unix seconds.
        model: The id of the model that answers.
        system_fingerprint: See `ModelDescription`.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    @classmethod
    def begin(cls, answer_id: str, model_id: str, choices: Choices, clock: Clock) -> Self:
        """Return the head of an answer that begins now."""
        return cls(answer_id, int(clock.unix_s()), model_id, choices.fingerprint)


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
    choices: Choices,
    framer: ChoiceFramer,
    writer: ChunkWriter,
    resumable: ResumableAnswer | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the framed events of an answer.

    Args:
        choices: The streams.
        framer: Makes the choices of chunks.
        writer: Frames them.
        resumable: Numbers the events, and leaves out those that the client has got; None for events
            without ids.
    """
    framed = partial(_framed, framer, writer, resumable)
    for index in range(len(choices)):
        opening = framer.opening(index)
        if opening is not None and (event := framed(index, [opening])):
            yield event
    deltas = choices.deltas() if resumable is None else resumable.deltas(choices)
    try:
        async with aclosing(deltas) as found:
            async for index, delta in found:
                writer.count(index, delta)
                for each in _divided(delta) if delta.prompt_logprobs else (delta,):
                    if event := framed(index, framer.gain(index, each), each):
                        yield event
                    if each.prompt_logprobs:
                        await asyncio.sleep(0)
    except RaystreamError as error:
        yield error_event(error)
        return
    for event in _ending(writer, resumable):
        yield event


def _framed(
    framer: ChoiceFramer,
    writer: ChunkWriter,
    resumable: ResumableAnswer | None,
    index: int,
    gained: list[dict[str, Any]],
    delta: TextDelta | None = None,
) -> bytes:
    """Return the events of what a choice has gained, without those that the client has got."""
    if resumable is None:
        return b"".join(map(writer.chunk, gained))
    unsent = resumable.unsent(framer, index, gained, delta)
    sent = resumable.ids.sent
    return b"".join([sent(index, framer.size(each), writer.chunk(each)) for each in unsent])


def _divided(delta: TextDelta) -> Sequence[TextDelta]:
    """Return each part of a prompt's log-probabilities as a delta by itself, then the rest.

    A prompt may be long: other requests go on between two parts.
    """
    parts = [TextDelta((), "", prompt_logprobs=(part,)) for part in delta.prompt_logprobs]
    return (*parts, replace(delta, prompt_logprobs=()))


def _ending(writer: ChunkWriter, resumable: ResumableAnswer | None) -> Iterator[bytes]:
    """Yield the events behind all choices."""
    if resumable is None:
        if writer.has_usage:
            yield writer.usage()
        yield DONE
        return
    if writer.has_usage and not resumable.has_usage:
        yield resumable.ids.marked(Mark.USAGE, writer.usage())
    yield LastEvent(resumable.ids.marked(Mark.DONE, DONE))
