"""One answer for all callers that ask at the same time, or soon after one another."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Runs work once for all callers that ask for it while it runs.

    So a route that needs no key costs no more when many clients call it at once.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Wrap the work; nothing runs yet.

        Args:
            work: Must end by itself, because it continues when all its callers have left.
        """
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the work's result or raise its error; cancelling one caller affects no other."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(self._land)
        return await asyncio.shield(self._task)

    async def next_result(self) -> T:
        """Return the result of work that begins after this call, or raise its error."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return await self.result()

    def _land(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # else Python logs "never retrieved" when all callers have left


class Remembered(Generic[T]):
    """Runs work once for all callers, and passes its result on for a while."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        memory_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap the work; nothing runs yet.

        Args:
            work: See `SingleFlight`. An error is passed on to those that wait, and not remembered.
            memory_s: How long a result is passed on.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._flight = SingleFlight(self._run)
        self._work = work
        self._memory_s = memory_s
        self._now_s = now_s
        self._last: tuple[float, T] | None = None

    async def result(self) -> T:
        """Return the work's result, at most `memory_s` old, or raise its error."""
        if self._last is None or self._now_s() - self._last[0] >= self._memory_s:
            return await self._flight.result()
        return self._last[1]

    async def next_result(self) -> T:
        """Return the result of work that begins after this call, or raise its error."""
        return await self._flight.next_result()

    async def _run(self) -> T:
        result = await self._work()
        self._last = self._now_s(), result
        return result
