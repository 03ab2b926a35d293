"""Streams that begin before their answers do: the client reads comments while a model is loaded."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from deployments.contract.errors import RaystreamError, overload_reason
from serve_app.http.request_record import current_record
from serve_app.streaming.error_event import error_event
from serve_app.streaming.event_stream import EventStreamResponse, Sleep
from serve_app.streaming.sse import encode_comment

AnswerT = TypeVar("AnswerT")


async def begun(
    answering: Callable[[], Awaitable[AnswerT | EventStreamResponse]], sleep: Sleep = asyncio.sleep
) -> AnswerT | EventStreamResponse:
    """Return an answer, or a stream that waits for it once the client is told to wait.

    Until then errors are raised, so that the client gets their status; later ones become the last
    event of the stream.

    Args:
        answering: Makes the answer to a request for a stream.
        sleep: Waits between pings.

    Raises:
        RaystreamError: The request was refused, or could not be answered.
    """
    record = current_record()
    if record is None:
        return await answering()
    told: list[bytes] = []
    must_wait = asyncio.Event()

    def take(notice: str) -> None:
        told.append(encode_comment(notice))
        must_wait.set()

    record.on_notice = take
    opening = _Opening(asyncio.ensure_future(answering()))
    waiting = asyncio.ensure_future(must_wait.wait())
    tasks: list[asyncio.Future[Any]] = [opening.task, waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        await opening.aclose()
        raise
    finally:
        waiting.cancel()
    if opening.task.done():
        return await opening.task
    return EventStreamResponse(_events(opening.task, told), opening, sleep=sleep)


class _Opening(Generic[AnswerT]):
    """The making of an answer, which can be closed at any moment."""

    def __init__(self, task: asyncio.Future[AnswerT | EventStreamResponse]) -> None:
        self.task = task

    async def aclose(self) -> None:
        """Cancel it, or close the stream that it has made."""
        self.task.cancel()
        await asyncio.wait([self.task])
        if self.task.cancelled() or self.task.exception() is not None:
            return
        made = self.task.result()
        if isinstance(made, EventStreamResponse):
            await made.source.aclose()
            await made.events.aclose()


async def _events(
    opening: asyncio.Future[AnswerT | EventStreamResponse], told: list[bytes]
) -> AsyncGenerator[bytes, None]:
    for comment in told:
        yield comment
    try:
        made = await asyncio.shield(opening)
    except RaystreamError as error:
        if (record := current_record()) is not None:
            record.failed(error.code, overload_reason(error))
        yield error_event(error)
        return
    assert isinstance(made, EventStreamResponse), "the request asks for a stream"
    async with aclosing(made.events) as events:
        async for event in events:
            yield event
