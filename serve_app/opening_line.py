"""The line in front of a model: requests that wait until replicas are asked to take them.

Asking is most of what a refusal costs, and when there is no room hundreds may want to ask at once.
So a bounded number asks at the same time, in the order in which they came, and the answer that not
even one more is admitted speaks for all who stood in line when the question was sent: had they
asked in that moment, they would have been told the same. It says nothing to those who came later,
so nobody is refused by what was true before he came.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from deployments.errors import OverloadedError

T = TypeVar("T")

MAX_NUM_ASKING: Final = 16
"""Enough for a thousand requests a second, since an answer takes some ten milliseconds; of those
who ask before the first refusal comes, each costs its own question."""


class FullError(OverloadedError):
    """There is no room for even one request more.

    Attributes:
        replica_id: Which replica has said so.
    """

    def __init__(self, message: str, retry_after_s: float | None, replica_id: str) -> None:
        """Keep what the replica has said."""
        super().__init__(message, None, retry_after_s)
        self.replica_id = replica_id


class OpeningLine:
    """Lets requests ask, each in its turn."""

    def __init__(self, max_num_asking: int = MAX_NUM_ASKING) -> None:
        """Start with nobody in line.

        Args:
            max_num_asking: Requests that may ask at the same time.
        """
        self._max_num_asking = max_num_asking
        self._num_asking = 0
        self._num_come = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what asking returns, as soon as it is this request's turn.

        Args:
            ask: Shows the request to the replicas; raises `FullError` if all of them are full.

        Raises:
            FullError: They are, or one who asked while this request stood in line was told so.
        """
        self._num_come += 1
        await self._wait_for_turn(self._num_come)
        num_come = self._num_come
        try:
            return await ask()
        except FullError as refusal:
            self._refuse(num_come, refusal)
            raise
        finally:
            self._end_turn()

    async def _wait_for_turn(self, place: int) -> None:
        if self._num_asking < self._max_num_asking and not self._waiting:
            self._num_asking += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((place, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # Who leaves just when it is his turn passes it on.
            if not turn.cancelled() and turn.exception() is None:
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._num_asking -= 1
        while self._waiting and self._num_asking < self._max_num_asking:
            _, turn = self._waiting.popleft()
            if not turn.done():  # else he has left
                self._num_asking += 1
                turn.set_result(None)

    def _refuse(self, num_come: int, refusal: FullError) -> None:
        """Refuse all who wait and were among the first so many to come."""
        while self._waiting and self._waiting[0][0] <= num_come:
            _, turn = self._waiting.popleft()
            if not turn.done():
                again = FullError(refusal.message, refusal.retry_after_s, refusal.replica_id)
                turn.set_exception(again)
