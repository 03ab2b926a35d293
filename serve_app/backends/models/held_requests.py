"""The requests that wait for a model's first replica: how many may, and whose make room.

They are bounded as a replica's queue is, and shared by the same rules (`contract.claims`): if as
many wait as may, the newest of the worst priority makes room for a better one; within a priority, a
tenant that uses less than its part gets the room of the newest of the tenant that is furthest
beyond its own. What makes room is refused: nothing of it has begun.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from deployments.contract.claims import Claim, FairShares
from deployments.contract.errors import OverloadedError, OverloadReason

RETRY_AFTER_S: Final = 5.0
"""When to come back after too many requests wait for a replica: by then one may run."""


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """A request that waits.

    Attributes:
        claim: The request's.
        num_places: How many sequences it asks for; 0 if a replica had admitted it.
        timer: Ends its wait if it makes room for another.
    """

    claim: Claim
    num_places: int
    timer: asyncio.Timeout


class HeldRequests:
    """The requests that wait for the first replica of one model."""

    def __init__(self, model_id: str, max_num_held: int) -> None:
        """Start without requests.

        Args:
            model_id: The model's id.
            max_num_held: The most sequences that wait.
        """
        self._model_id = model_id
        self._max_num_held = max_num_held
        self._held: dict[_Held, None] = {}  # oldest first
        self._shares = FairShares()  # knows the weights of those that wait

    @asynccontextmanager
    async def holding(self, claim: Claim, num_places: int) -> AsyncIterator[None]:
        """Hold places during the block, which is cancelled if they are needed for another request.

        Args:
            claim: The request's.
            num_places: Its sequences; 0 if a replica had admitted it: it is not refused.

        Raises:
            OverloadedError: Too many wait already, or the request has made room for another.
        """
        self._make_room(claim, num_places)
        held = _Held(claim, num_places, asyncio.timeout(None))
        self._held[held] = None
        self._shares.enter(claim)
        try:
            async with held.timer:
                yield
        except TimeoutError:
            if not held.timer.expired():
                raise
            raise self._too_many() from None
        finally:
            self._shares.leave(claim)
            self._held.pop(held, None)

    @property
    def _num_held(self) -> int:
        return sum(each.num_places for each in self._held)

    def _make_room(self, claim: Claim, num_places: int) -> None:
        """Let others go, if there is no room for a request.

        Raises:
            OverloadedError: Too many wait, and none makes room.
        """
        num_missing = self._num_held + num_places - self._max_num_held
        # A request that no other waits before is left to the replica, however large it is.
        if not num_places or not self._num_held or num_missing <= 0:
            return
        waiting = [(each, each.claim, each.num_places) for each in self._held if each.num_places]
        leaving = self._shares.to_go(claim, num_missing, self._max_num_held, waiting)
        if not leaving:
            raise self._too_many()
        now_s = asyncio.get_running_loop().time()
        for each in leaving:
            del self._held[each]
            each.timer.reschedule(now_s)

    def _too_many(self) -> OverloadedError:
        return OverloadedError(
            f"The model {self._model_id!r} is being loaded, and {self._num_held} sequences "
            f"wait for it, of {self._max_num_held} that it admits. Try again in "
            f"{RETRY_AFTER_S:g} s.",
            None,
            RETRY_AFTER_S,
            OverloadReason.LOADING,
        )
