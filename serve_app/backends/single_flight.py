"""One answer for all callers that ask at the same time."""

import asyncio
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

    def _land(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # else Python logs "never retrieved" when all callers have left
