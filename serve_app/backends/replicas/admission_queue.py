"""The queue in front of a model: requests that wait for their turn to ask replicas for room.

Asking replicas is the largest part of a refusal's cost, and a burst may bring hundreds of requests
to a model without room. So a bounded number of requests ask at the same time, in order of arrival.
A refusal that says there is no room for any request goes to every request that was queued when the
question was sent, because each would have got the same answer at that moment. Requests that arrived
later ask for themselves, so no request is refused on information older than its arrival.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from deployments.contract.errors import OverloadedError, OverloadReason

T = TypeVar("T")

MAX_NUM_ASKING: Final = 16
"""Enough for a thousand requests a second, since an answer takes some ten milliseconds. Until the
first refusal comes, each request asks a question of its own."""


class FullError(OverloadedError):
    """There is no room for any further request.

    Attributes:
        replica_id: The replica that refused.
    """

    def __init__(
        self, message: str, retry_after_s: float | None, reason: OverloadReason, replica_id: str
    ) -> None:
        super().__init__(message, None, retry_after_s, reason)
        self.replica_id = replica_id

    def copied(self) -> "FullError":
        """Return the same refusal, to be raised for another request."""
        return FullError(self.message, self.retry_after_s, self.reason, self.replica_id)


class AdmissionQueue:
    """Lets a bounded number of requests ask at a time, in order of arrival."""

    def __init__(self, max_num_asking: int = MAX_NUM_ASKING) -> None:
        """Start with an empty queue.

        Args:
            max_num_asking: Requests that may ask at the same time.
        """
        self._max_num_asking = max_num_asking
        self._num_asking = 0
        self._num_arrived = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for this request's turn and return what `ask` returns.

        Args:
            ask: Offers the request to the replicas; raises `FullError` if all of them are full.

        Raises:
            FullError: All replicas are full, or were full when another request asked them while
                this one was queued.
        """
        self._num_arrived += 1
        await self._wait_for_turn(self._num_arrived)
        num_arrived = self._num_arrived
        try:
            return await ask()
        except FullError as refusal:
            self._refuse(num_arrived, refusal)
            raise
        finally:
            self._end_turn()

    async def _wait_for_turn(self, number: int) -> None:
        if self._num_asking < self._max_num_asking and not self._queue:
            self._num_asking += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((number, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # Cancelled just as the turn came: pass the turn on.
            if not turn.cancelled() and turn.exception() is None:
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._num_asking -= 1
        while self._queue and self._num_asking < self._max_num_asking:
            _, turn = self._queue.popleft()
            if not turn.done():  # else the request was cancelled
                self._num_asking += 1
                turn.set_result(None)

    def _refuse(self, num_arrived: int, refusal: FullError) -> None:
        """Refuse the queued requests that are among the first `num_arrived` to arrive."""
        while self._queue and self._queue[0][0] <= num_arrived:
            _, turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(refusal.copied())
