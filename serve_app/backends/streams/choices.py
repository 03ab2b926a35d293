"""The answers to one request: several streams, read as one.

To the replicas each answer is a sequence of its own. If a request holds several prompts, each gets
the same number of answers, and the answers to the first prompt come first. If one stream can't be
opened or breaks, the whole request fails. Closing closes all streams.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from secrets import token_hex
from typing import Any, Literal, Self, cast

from deployments.contract.errors import (
    RaystreamError,
    ReplicaUnavailableError,
    overload_reason,
)
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import GenerationRequest, GenerationStream, RequestGroup
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas.backend import Backend
from serve_app.http.request_record import current_record

TrueFinish = Literal["stop", "length"]


class Choices:
    """The open streams of one request: one for each answer, at least one.

    Attributes:
        num_per_prompt: Answers to each of the request's prompts.
    """

    def __init__(self, streams: Sequence[GenerationStream], num_prompts: int = 1) -> None:
        """Take over the streams; a stream's position is the index of its answer."""
        self._streams = tuple(streams)
        self.num_per_prompt = len(self._streams) // num_prompts

    @classmethod
    async def open(
        cls, openings: Sequence[Coroutine[Any, Any, GenerationStream]], num_prompts: int = 1
    ) -> Self:
        """Open all streams at once; if one fails, close the others.

        Args:
            openings: One for each answer; the answers to one prompt are adjacent.
            num_prompts: Number of prompts; each gets the same number of answers.

        Raises:
            RaystreamError: A request was refused, or no replica could take it.
        """
        tasks = [asyncio.ensure_future(opening) for opening in openings]
        try:
            return cls(await asyncio.gather(*tasks), num_prompts)
        except BaseException:
            for task in tasks:
                task.cancel()
            opened = await asyncio.gather(*tasks, return_exceptions=True)
            await cls([s for s in opened if not isinstance(s, BaseException)]).aclose()
            raise

    @classmethod
    async def of(
        cls,
        backend: Backend,
        requests: Sequence[GenerationRequest],
        num_prompts: int = 1,
    ) -> Self:
        """Open a stream for each request, in order; see `open`.

        The first request asks for room for all of them, so that a busy model takes all or none.

        Raises:
            RaystreamError: A request was refused, or no replica could take it.
        """
        first, *others = _as_group(requests)
        opened = await backend.send(first)
        if not others:
            return cls([opened])
        # One answer never has two versions of the model.
        others = [replace(each, fingerprint=opened.accepted.fingerprint) for each in others]
        try:
            return await cls.open([_return(opened), *map(backend.send, others)], num_prompts)
        except BaseException:
            # A task that is cancelled before it runs returns no stream that could be closed.
            await opened.aclose()
            raise

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._streams)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts; a prompt with several answers counts once."""
        return sum(s.accepted.num_prompt_tokens for s in self._streams[:: self.num_per_prompt])

    @property
    def fingerprint(self) -> str | None:
        """The version of the model that all answers come from."""
        return self._streams[0].accepted.fingerprint

    @property
    def prompt_digests(self) -> tuple[bytes, ...]:
        """A digest of each prompt; see `Accepted`."""
        return tuple(s.accepted.prompt_digest for s in self._streams[:: self.num_per_prompt])

    @property
    def reasoning(self) -> PromptReasoning:
        """What the end of the first prompt says about the model's reasoning."""
        return self._streams[0].accepted.reasoning

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield each answer's deltas with the answer's index, as they come.

        Raises:
            RaystreamError: One of the answers has failed; see `GenerationStream`.
        """
        readers = [_joined(stream, at) for at, stream in enumerate(self._streams)]
        return readers[0] if len(readers) == 1 else _merged(readers)

    async def read_to_end(self) -> list[TextDelta]:
        """Read all answers to their ends, close them, and return each as one delta.

        Raises:
            RaystreamError: See `deltas`.
        """
        parts: list[list[TextDelta]] = [[] for _ in self._streams]
        async with aclosing(self), aclosing(self.deltas()) as found:
            async for index, delta in found:
                parts[index].append(delta)
        return [TextDelta.join(part) for part in parts]

    async def aclose(self) -> None:
        """Abort every answer that has not ended; closing twice is harmless."""
        if len(self._streams) == 1:  # the usual case; it needs no task
            await self._streams[0].aclose()
        else:
            await asyncio.gather(*(stream.aclose() for stream in self._streams))


def _as_group(requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """Return the requests, marked as a group if there are several."""
    if len(requests) == 1:
        return requests
    # Clients may reuse a request id, so the group gets an id of its own.
    group = RequestGroup(token_hex(16), len(requests), is_first=False)
    return [
        replace(request, group=replace(group, is_first=index == 0))
        for index, request in enumerate(requests)
    ]


async def _return(stream: GenerationStream) -> GenerationStream:
    return stream


async def _joined(
    stream: GenerationStream, choice_index: int
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the choice's index and one delta for each list of deltas that arrived together.

    The index costs nothing here; another generator around this one would cost time per message.

    Args:
        stream: The source of the deltas.
        choice_index: The index of the stream's answer in the request.

    Raises:
        RaystreamError: The text was not finished; see `GenerationStream`.
    """
    record = current_record()
    finish: TrueFinish | None = None
    try:
        async for deltas in stream:
            if not deltas:
                continue
            delta = TextDelta.join(deltas)
            if delta.finish_reason is not None:
                finish = true_finish(delta.finish_reason)
            if record is not None:
                record.gained(len(delta.token_ids), finish)
            yield choice_index, delta
        if finish is None:  # the stream was closed while it was read
            raise ReplicaUnavailableError("The text ended before it was finished.")
    except RaystreamError as error:
        if record is not None:
            record.failed(error.code, overload_reason(error))
        raise


def true_finish(reason: FinishReason) -> TrueFinish:
    """Return why a text ended, as OpenAI names it."""
    return cast("TrueFinish", reason.value)  # a stream raises in place of the others


async def _merged(
    readers: Sequence[AsyncGenerator[tuple[int, TextDelta], None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of several answers as they come."""
    waiting = {asyncio.ensure_future(_next(reader)): reader for reader in readers}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                found, reader = task.result(), waiting.pop(task)
                if found is not None:
                    waiting[asyncio.ensure_future(_next(reader))] = reader
                    yield found
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(reader: AsyncIterator[tuple[int, TextDelta]]) -> tuple[int, TextDelta] | None:
    """Return the reader's next item; None at its end."""
    return await anext(reader, None)
