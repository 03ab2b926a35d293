"""The hand-made queue batcher: one asyncio.Queue, a reply queue for each call, one loop.

The loop takes up to `max_batch_size` pieces, or those that arrive within `timeout_s` of the first,
and calls the model in the event loop: new requests are not even read from their sockets meanwhile.
A batch that does not fill waits the whole timeout.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic

from benchmarks.baselines.pipeline_function import PipelineFunction, Result


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Result]):
    """A piece in the queue.

    Attributes:
        index: The piece's place in its call.
        piece: The text.
        replies: The call's own queue, which receives the piece's place and result.
    """

    index: int
    piece: str
    replies: "asyncio.Queue[tuple[int, Result | Exception]]"


class QueueBatcher(Generic[Result]):
    """Batches the pieces of all calls."""

    def __init__(
        self, pipeline: PipelineFunction[Result], max_batch_size: int, timeout_s: float
    ) -> None:
        """Start with an empty queue.

        Args:
            pipeline: The model.
            max_batch_size: Maximum number of pieces in one call of the model (BATCH_SIZE_MAX).
            timeout_s: How long a batch's first piece waits for others (BATCH_TIMEOUT).
        """
        self._pipeline = pipeline
        self._max_batch_size = max_batch_size
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[_Waiting[Result]] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the loop inside the context."""
        loop = asyncio.create_task(self._run())
        try:
            yield
        finally:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop

    async def classify(self, pieces: Sequence[str]) -> list[Result]:
        """Return a result for each piece.

        Raises:
            Exception: The model raised it for a batch with one of the pieces.
        """
        replies: asyncio.Queue[tuple[int, Result | Exception]] = asyncio.Queue()
        for index, piece in enumerate(pieces):
            self._queue.put_nowait(_Waiting(index, piece, replies))
        results: dict[int, Result] = {}
        for _ in pieces:
            index, result = await replies.get()
            if isinstance(result, Exception):
                raise result
            results[index] = result
        return [results[index] for index in range(len(pieces))]

    async def _run(self) -> None:
        while True:
            batch = await self._take()
            for waiting, result in zip(batch, self._results(batch), strict=True):
                waiting.replies.put_nowait((waiting.index, result))

    async def _take(self) -> list[_Waiting[Result]]:
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while len(batch) < self._max_batch_size:
                    batch.append(await self._queue.get())
        return batch

    def _results(self, batch: Sequence[_Waiting[Result]]) -> Sequence[Result | Exception]:
        try:
            return self._pipeline([waiting.piece for waiting in batch])
        except Exception as error:  # noqa: BLE001 - goes to every call with pieces in the batch
            return [error] * len(batch)
