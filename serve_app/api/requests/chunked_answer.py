"""Answers in the shape of chat completions and of completions: whole, or as chunks of a stream."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from fastapi import Request, Response

from serve_app.api.openai.answer_schema import AnswerFields
from serve_app.api.openai.answer_stream import AnswerHead, ChunkWriter, answer_events
from serve_app.api.openai.resumption import ChoiceFramer, Resumable
from serve_app.api.reasoning.separation import Separation
from serve_app.api.requests.context import ApiContext
from serve_app.backends.streams.choices import Choices
from serve_app.http.request_id import request_id_of
from serve_app.streaming.event_stream import EventStreamResponse

AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)
BodyT = TypeVar("BodyT", bound=AnswerFields)


@dataclass(frozen=True, slots=True)
class ChunkedAnswer(Generic[AnswerT_co]):
    """The answers to a request, whose streams are open.

    Attributes:
        head: The fields of the answer, and of all its chunks.
        choices: The streams.
        reasoning: How reasoning is separated; None if it is not.
    """

    head: AnswerHead
    choices: Choices
    reasoning: Separation | None

    def framer(self) -> ChoiceFramer:
        """Return what makes the choices of a stream's chunks."""
        raise NotImplementedError

    def whole(self) -> Awaitable[AnswerT_co]:
        """Read the streams to their end, and return the whole answer."""
        raise NotImplementedError


async def answered(
    context: ApiContext,
    body: BodyT,
    request: Request,
    chunk_object: str,
    opening: Callable[[ApiContext, BodyT, str], Awaitable[ChunkedAnswer[AnswerT]]],
) -> AnswerT | Response:
    """Return what `opening` opens: whole, or as a stream of chunks, which its client can resume.

    Raises:
        RaystreamError: The request was refused, or could not be answered.
    """
    resumable = Resumable.of(body, body.num_answers, request.headers, context.clock)
    if resumable is not None and resumable.is_done:
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def answer() -> AnswerT | EventStreamResponse:
        seeded = body if resumable is None else resumable.seeded(body)
        opened = await opening(context, seeded, request_id_of(request))
        choices = opened.choices
        resumed = None if resumable is None else await resumable.begin(choices)
        if not body.stream:
            return await opened.whole()
        writer = ChunkWriter(
            opened.head, chunk_object, body.stream_options, choices, opened.reasoning
        )
        events = answer_events(choices, opened.framer(), writer, resumed)
        return EventStreamResponse(events, choices, sleep=context.clock.sleep)

    return await context.answer(body.model, answer, streams=bool(body.stream))
