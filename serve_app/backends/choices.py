"""The several answers to one request: as many streams, read as one.

Each answer is a sequence of its own to the replicas. Where a request holds several prompts, the
answers to the first come first, as many to each. They stand and fall together: if one can't be
opened or breaks, the request has failed, and closing closes all.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from secrets import token_hex
from typing import Any, Self

from deployments.contract import GenerationRequest, RequestGroup
from serve_app.backends import GenerationBackend, GenerationStream
from serve_app.generation import Piece, join, pieces


class Choices:
    """The open streams of one request, one for each answer, at least one.

    Attributes:
        num_per_prompt: Answers to each of the request's prompts.
    """

    def __init__(self, streams: Sequence[GenerationStream], num_prompts: int = 1) -> None:
        """Take over the streams; an answer's index is its stream's."""
        self._streams = tuple(streams)
        self.num_per_prompt = len(self._streams) // num_prompts

    @classmethod
    async def open(
        cls, openings: Sequence[Coroutine[Any, Any, GenerationStream]], num_prompts: int = 1
    ) -> Self:
        """Open all streams at once; if one fails, close the others.

        Args:
            openings: One for each answer, those to one prompt in a row.
            num_prompts: Prompts that they answer, each as often as the others.

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
        backend: GenerationBackend,
        requests: Sequence[GenerationRequest],
        num_prompts: int = 1,
    ) -> Self:
        """Open a stream for each request, in their order; see `open`.

        The first asks for all of them, so that a busy model takes all or none.

        Raises:
            RaystreamError: A request was refused, or no replica could take it.
        """
        first, *others = _as_group(requests)
        opened = await backend.generate(first)
        if not others:
            return cls([opened])
        try:
            return await cls.open([_return(opened), *map(backend.generate, others)], num_prompts)
        except BaseException:
            # A task that is cancelled before it runs returns nothing that could be closed.
            await opened.aclose()
            raise

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._streams)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts; one that is answered several times counts once."""
        return sum(s.num_prompt_tokens for s in self._streams[:: self.num_per_prompt])

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answers' pieces as they come.

        Raises:
            RaystreamError: One of the answers has failed; see `generation.pieces`.
        """
        readers = [pieces(stream, at) for at, stream in enumerate(self._streams)]
        return readers[0] if len(readers) == 1 else _merged(readers)

    async def whole(self) -> list[Piece]:
        """Read all answers to their ends, close them, and return each as one piece.

        Raises:
            RaystreamError: As `pieces` does.
        """
        parts: list[list[Piece]] = [[] for _ in self._streams]
        async with aclosing(self), aclosing(self.pieces()) as found:
            async for piece in found:
                parts[piece.choice_index].append(piece)
        return [join(part) for part in parts]

    async def aclose(self) -> None:
        """Abort every answer that has not ended; closing twice is harmless."""
        if len(self._streams) == 1:  # as nearly always: no task is needed
            await self._streams[0].aclose()
        else:
            await asyncio.gather(*(stream.aclose() for stream in self._streams))


def _as_group(requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """Return the requests, each with its part in the group, if they are several."""
    if len(requests) == 1:
        return requests
    # Clients may use a request id twice.
    group = RequestGroup(token_hex(16), len(requests), is_first=False)
    return [
        replace(request, group=replace(group, is_first=index == 0))
        for index, request in enumerate(requests)
    ]


async def _return(stream: GenerationStream) -> GenerationStream:
    return stream


async def _merged(
    readers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of several answers as they come."""
    waiting = {asyncio.ensure_future(_next(reader)): reader for reader in readers}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                next_piece, reader = task.result(), waiting.pop(task)
                if next_piece is not None:
                    waiting[asyncio.ensure_future(_next(reader))] = reader
                    yield next_piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(reader: AsyncIterator[Piece]) -> Piece | None:
    """Return the reader's next piece; None at its end."""
    return await anext(reader, None)
