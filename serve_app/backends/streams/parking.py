"""The parked streams of one model: those that have begun, gave up their place, and wait to go on.

A parked stream is only its request and what its client has of the answer; it holds nothing of a
replica. One of them at a time is offered to the replica that the router picks, in the order of
their claims, and within a priority those of the tenant that got least first; the next follows once
that one goes on. A replica that has no turn for it soon gives it back. So however many are parked,
an ingress asks about once a second.

No replica may have room for the first for long, or ever. So while it is given back, every other
offer is one of the others, each once before any of them comes again.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from deployments.contract.claims import Claim, ClaimQueue, FairShares
from deployments.contract.errors import OverloadedError, OverloadReason

RETRY_AFTER_S: Final = 5.0
"""When to come back after the lot was full: by then some streams may have gone on."""

OFFER_INTERVAL_S: Final = 0.1
"""The least time from one that was given back to the next offer. A full replica keeps it for a
second, but one that is about to end, or has just died, gives it back at once."""


@dataclass(eq=False)
class ParkedPlace:
    """The place of one parked stream; see `ParkingLot.enter`.

    Attributes:
        claim: The claim of its request.
        arrival: Its number among all that ever came; lower is older.
        came_s: When it was parked, moved back by what it had waited before, by the loop's clock.
        is_resumed: Whether it goes before new ones: all that are parked have begun.
        offered_s: When it was offered, by the loop's clock; None while it waits for that.
    """

    lot: "ParkingLot"
    claim: Claim
    arrival: int
    came_s: float
    is_resumed: bool = True
    offered_s: float | None = None
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _patience: asyncio.TimerHandle | None = None  # with the replica that has taken it

    async def wait_for_turn(self) -> None:
        """Wait until it is this stream that is offered."""
        await self._turn.wait()

    def begin_turn(self) -> None:
        """Note that it is offered from now on."""
        self.offered_s = asyncio.get_running_loop().time()
        self._turn.set()

    def note_taken(self, patience_s: float) -> None:
        """Note that a replica has taken it; if nothing comes for so long, the next is offered.

        It stays with its replica, which may hang, or gather memory for it.
        """
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(patience_s, self.lot.let_others, self)

    def end_turn(self) -> None:
        """Note that it was given back: it waits again, at its place."""
        self._end_patience()
        if self.offered_s is not None:
            self.offered_s = None
            self._turn.clear()
            self.lot.take_back(self)

    def leave(self) -> None:
        """Give the place up: the stream goes on, or has ended. Leaving twice is harmless."""
        self._end_patience()
        self.lot.leave(self)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class ParkingLot:
    """Holds a bounded number of parked streams, and offers one at a time."""

    def __init__(
        self,
        max_parked: int,
        aging_s: float,
        shares: FairShares | None = None,
        interval_s: float = OFFER_INTERVAL_S,
    ) -> None:
        """Start empty.

        Args:
            max_parked: The most streams that it holds.
            aging_s: Seconds of waiting that are worth one step of priority.
            shares: What this ingress has passed on to each tenant; None starts without tenants.
            interval_s: The least time from one that was given back to the next offer.
        """
        self._max_parked = max_parked
        self._interval_s = interval_s
        self._shares = FairShares() if shares is None else shares
        self._queue = ClaimQueue[ParkedPlace](aging_s, self._rank)
        self._held: dict[ParkedPlace, None] = {}
        self._given_back: set[ParkedPlace] = set()  # since all that wait were offered
        self._is_for_others = False
        self._offered: ParkedPlace | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._num_arrivals = 0
        self._num_kept = 0

    def __len__(self) -> int:
        """Return how many streams are parked."""
        return len(self._held)

    @property
    def has_room(self) -> bool:
        """Whether it takes one more stream."""
        return len(self._held) + self._num_kept < self._max_parked

    def keep_place(self) -> bool:
        """Keep a place for a stream that leaves its replica now; return whether there is one.

        It enters only when its client reads on: an offer to one that nobody reads would be lost.
        """
        if not self.has_room:
            return False
        self._num_kept += 1
        return True

    def free_place(self) -> None:
        """Give up a place that was kept: its stream enters now, or has ended."""
        self._num_kept -= 1

    def enter(self, claim: Claim) -> ParkedPlace | None:
        """Return a place for a stream that was parked; None if there is none.

        Args:
            claim: With what it has waited until now.
        """
        if not self.has_room:
            return None
        came_s = asyncio.get_running_loop().time() - claim.waited_s
        place = ParkedPlace(self, claim, self._num_arrivals, came_s)
        self._num_arrivals += 1
        self._held[place] = None
        self._shares.enter(claim)
        self._queue.add(place)
        self._offer_next()
        return place

    def require_room(self, claim: Claim) -> None:
        """Refuse new work that could only be parked, too.

        Work of a better priority than all that are parked is let through, and so is that of a
        tenant who has less than its part of a full lot.

        Raises:
            OverloadedError: The lot is full, of streams that go before it.
        """
        if self.has_room or not self._held:
            return
        claims = [place.claim for place in self._held]
        if claim.priority < min(each.priority for each in claims):
            return
        weights = {each.tenant: each.weight for each in claims} | {claim.tenant: claim.weight}
        part = self._max_parked * claim.weight / sum(weights.values())
        if sum(each.tenant == claim.tenant for each in claims) < part:
            return
        raise OverloadedError(
            f"{len(self._held)} answers that have begun wait to go on (limits.max_parked is "
            f"{self._max_parked}). Try again in {RETRY_AFTER_S:g} s.",
            None,
            RETRY_AFTER_S,
            OverloadReason.PARKED,
        )

    def take_back(self, place: ParkedPlace) -> None:
        """Let the one that was offered wait again; the next is offered a little later."""
        self._given_back.add(place)
        self._queue.add(place)
        if place is self._offered:
            self._offered = None
        if self._offered is None and self._pause is None:
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(self._interval_s, self._end_pause)

    def let_others(self, place: ParkedPlace) -> None:
        """Offer the next, though the one that is offered keeps its place."""
        if place is self._offered:
            self._offered = None
            self._offer_next()

    def leave(self, place: ParkedPlace) -> None:
        """Drop a stream, if it is still here."""
        if place not in self._held:
            return
        del self._held[place]
        self._given_back.discard(place)
        self._shares.leave(place.claim)
        if place in self._queue:
            self._queue.remove(place)
        self.let_others(place)

    def _rank(self, tenant: str) -> tuple[float, int]:
        return self._shares.counter(tenant), 0  # none has more than its one turn

    def _next(self) -> ParkedPlace | None:
        """Return the first, or by turns one of the others if the first was given back."""
        first = self._queue.first
        if first is None or first not in self._given_back:
            return first
        self._is_for_others = not self._is_for_others
        if not self._is_for_others:
            return first
        order = list(self._queue)
        others = [place for place in order if place not in self._given_back]
        if not others:
            self._given_back, others = {first}, order[1:]
        return others[0] if others else first

    def _end_pause(self) -> None:
        self._pause = None
        self._offer_next()

    def _offer_next(self) -> None:
        if self._offered is None and self._pause is None:
            self._offered = self._next()
            if self._offered is not None:
                self._queue.remove(self._offered)
                self._offered.begin_turn()
