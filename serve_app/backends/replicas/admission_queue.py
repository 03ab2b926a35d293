"""The queue in front of a model: requests that wait for their turn to ask replicas for room.

Asking replicas is the largest part of a refusal's cost, and a burst may bring hundreds of requests
to a model without room. So a bounded number of requests ask at the same time, in the order of
their claims (`ClaimQueue`): by priority, which ages; then the tenant that got the least service,
and of a tenant the oldest.

A refusal that says there is no room for any further request of a tenant goes to every request of
that tenant, with no better priority, that was queued when the question was sent, because each would
have got the same answer at that moment. Requests that arrived later ask for themselves, so no
request is refused on information older than its arrival.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from deployments.contract.claims import NO_CLAIM, PRIORITY_AGING_S, Claim, ClaimQueue, FairShares
from deployments.contract.errors import OverloadedError, OverloadReason

T = TypeVar("T")

MAX_NUM_ASKING: Final = 16
"""Enough for a thousand requests a second, since an answer takes some ten milliseconds. Until the
first refusal comes, each request asks a question of its own."""


class FullError(OverloadedError):
    """There is no room for any further request of the tenant, with no better priority.

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


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A request that waits for its turn; see `Claimant`.

    Attributes:
        claim: The request's.
        arrival: Its number among all that ever arrived; lower is older.
        came_s: When it came, by the event loop's clock.
        come: Done once its turn has come, or with the refusal of another request.
        is_resumed: Whether it was promised a turn; those that were skip this queue.
    """

    claim: Claim
    arrival: int
    came_s: float
    come: "asyncio.Future[None]"
    is_resumed: bool = field(default=False, init=False)


class AdmissionQueue:
    """Lets a bounded number of requests ask at a time, in the order of their claims."""

    def __init__(
        self,
        shares: FairShares | None = None,
        aging_s: float = PRIORITY_AGING_S,
        max_num_asking: int = MAX_NUM_ASKING,
    ) -> None:
        """Start with an empty queue.

        Args:
            shares: What this ingress has passed on to each tenant; None starts without tenants.
            aging_s: Seconds of waiting that are worth one step of priority.
            max_num_asking: Requests that may ask at the same time.
        """
        self._shares = FairShares() if shares is None else shares
        self._max_num_asking = max_num_asking
        self._num_asking = 0
        self._num_arrived = 0
        self._queue = ClaimQueue[_Turn](aging_s, lambda tenant: (self._shares.counter(tenant), 0))

    async def run(self, ask: Callable[[], Awaitable[T]], claim: Claim = NO_CLAIM) -> T:
        """Wait for this request's turn and return what `ask` returns.

        Args:
            ask: Offers the request to the replicas; raises `FullError` if all of them are full.
            claim: The request's.

        Raises:
            FullError: All replicas are full, or were full when another request asked them while
                this one was queued.
        """
        self._num_arrived += 1
        self._shares.enter(claim)
        try:
            await self._wait_for_turn(claim)
        finally:
            self._shares.leave(claim)
        num_arrived = self._num_arrived
        try:
            return await ask()
        except FullError as refusal:
            self._refuse(claim, num_arrived, refusal)
            raise
        finally:
            self._end_turn()

    async def _wait_for_turn(self, claim: Claim) -> None:
        if self._num_asking < self._max_num_asking and not len(self._queue):
            self._num_asking += 1
            return
        loop = asyncio.get_running_loop()
        turn = _Turn(claim, self._num_arrived, loop.time(), loop.create_future())
        self._queue.add(turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            # Cancelled just as the turn came: pass the turn on.
            elif not turn.come.cancelled() and turn.come.exception() is None:
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._num_asking -= 1
        while self._num_asking < self._max_num_asking and (turn := self._queue.first) is not None:
            self._queue.remove(turn)
            if not turn.come.done():  # else the request was cancelled
                self._num_asking += 1
                turn.come.set_result(None)

    def _refuse(self, claim: Claim, num_arrived: int, refusal: FullError) -> None:
        """Refuse what the same tenant has queued, if it is among the first `num_arrived`."""
        for turn in list(self._queue.unordered):
            is_same = turn.claim.tenant == claim.tenant and turn.claim.priority >= claim.priority
            if is_same and turn.arrival <= num_arrived:
                self._queue.remove(turn)
                if not turn.come.done():
                    turn.come.set_exception(refusal.copied())
