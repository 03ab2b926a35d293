"""One answer for all who ask at the same time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Does the same work once for all who want it while it is being done.

    So a question that anybody may ask, without a key, costs no more for being asked by many.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Do nothing yet.

        Args:
            work: Must end by itself, however long nobody waits for it any more.
        """
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return what the work returns, or raise its error; one who leaves disturbs no other."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(self._land)
        return await asyncio.shield(self._task)

    def _land(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # else Python complains where everybody has left
