"""One stream's stays in the parking lot: when it enters, how it is offered, how long it has waited.

`parking` holds the streams of all requests. `failover_stream` is the stream; it sends the calls.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

from deployments.contract.claims import Claim
from deployments.contract.errors import ModelChangedError, OverloadedError, RaystreamError
from deployments.contract.generation import GenerationStream
from serve_app.backends.replicas.replica_errors import LostAfterStartError, NoReplicaError
from serve_app.backends.streams.parking import ParkedPlace, ParkingLot
from serve_app.backends.streams.retries import LOST, FailoverLimits, Retries


class StreamParking:
    """Parks one stream, any number of times, and offers it until it goes on.

    Attributes:
        may_park: Whether a replica may give the stream back.
    """

    def __init__(
        self, lot: ParkingLot | None, claim: Claim, retries: Retries, limits: FailoverLimits
    ) -> None:
        """Start with a stream that runs.

        Args:
            lot: Takes it while it is parked; None if no replica gives it back.
            claim: Its request's.
            retries: The attempts of its request.
            limits: Limits on the search for another replica.
        """
        self.may_park = lot is not None
        self._lot = lot
        self._first_claim = claim
        self._retries = retries
        self._limits = limits
        self._place: ParkedPlace | None = None  # until the stream goes on
        self._has_kept = False  # whether the lot keeps a place for it
        self._is_stopped = False  # from when it was given back until it goes on
        self._counted = ExitStack()  # closing it ends what is counted of that time
        self._patience_s = limits.first_patience_s  # with a replica to which it is offered
        self._waited_s = claim.waited_s
        self._now_s = asyncio.get_running_loop().time
        self._last_s = self._now_s()  # of what came last, or of leaving the lot
        self._offered_s = 0.0

    @property
    def is_parked(self) -> bool:
        """Whether it has a place, which it keeps until a replica brings something."""
        return self._place is not None

    @property
    def has_room(self) -> bool:
        """Whether the lot, if there is one, takes one more stream."""
        return self.may_park and self._lot is not None and self._lot.has_room

    def keep_place(self) -> bool:
        """Keep a place for it until it is parked or ends; return whether there is one."""
        if self._place is not None:  # it was offered to its replica, which has sent nothing yet
            return True
        assert not self._has_kept, "it leaves its replica once"
        self._has_kept = self.may_park and self._lot is not None and self._lot.keep_place()
        return self._has_kept

    def _free_place(self) -> None:
        if self._has_kept and self._lot is not None:
            self._has_kept = False
            self._lot.free_place()

    @property
    def waited_until_s(self) -> float:
        """When it was offered last, by the loop's clock: now while it waits for that."""
        if self._place is None:
            return self._offered_s
        offered_s = self._place.offered_s
        return self._now_s() if offered_s is None else offered_s

    @property
    def claim(self) -> Claim:
        """The request's, with what it has waited for its turns after its first one."""
        silent_s = 0.0 if self._place is None else self._now_s() - self._last_s
        return replace(self._first_claim, waited_s=self._waited_s + silent_s)

    def note_message(self) -> None:
        """Note that something has come: it goes on."""
        if self._is_stopped:
            self.leave()
        self._last_s = self._now_s()

    def park(self) -> bool:
        """Let it wait, since a replica has given it back; without a place it is no longer parked.

        Returns:
            is_new: Whether it has run until now; False if it was parked, and was only offered.
        """
        if self._place is not None:  # no replica had a turn for it
            self._place.end_turn()
            return False
        assert self._lot is not None, "no replica parks a stream that has no lot"
        self._free_place()
        silent_s = self._now_s() - self._last_s  # in the replica, which it had to leave
        self._place = self._lot.enter(
            replace(self._first_claim, waited_s=self._waited_s + silent_s)
        )
        self.may_park = self._place is not None
        self._is_stopped = True
        self._counted.enter_context(self._retries.parked())
        return True

    def leave(self) -> None:
        """Note that it goes on, has ended, or is looked after like a lost one."""
        self._free_place()
        self._is_stopped = False
        self._counted.close()
        if self._place is not None:
            self._offered_s = self.waited_until_s
            self._waited_s = self.claim.waited_s
            self._last_s = self._now_s()
            self._place.leave()
            self._place = None
            self._patience_s = self._limits.first_patience_s

    async def wait_for_turn(self) -> None:
        """Wait until it is this stream that is offered."""
        assert self._place is not None, "only a parked stream has turns"
        await self._place.wait_for_turn()

    async def offer(
        self, send: Callable[[], Awaitable[GenerationStream]]
    ) -> GenerationStream | None:
        """Offer it to a replica, in its turn; None if it waits again, or has left the lot."""
        place = self._place  # none is left if the stream is closed meanwhile
        assert place is not None, "it is offered from its place"
        try:
            async with asyncio.timeout(self._patience_s) as timer:
                taken = await send()
        except TimeoutError:
            if not timer.expired():
                raise
            self._patience_s *= 2
            place.end_turn()
        except OverloadedError:
            place.end_turn()
        except (NoReplicaError, ModelChangedError):
            self.leave()  # others may be of the version that runs
        except LOST as error:
            self.note_lost(error, has_started=isinstance(error, LostAfterStartError))
        else:
            place.note_taken(self._limits.first_patience_s)
            return taken
        return None

    def note_lost(self, error: RaystreamError, *, has_started: bool) -> None:
        """Wait again after the replica to which it was offered was lost, or leave as a suspect."""
        assert self._place is not None, "it is offered from its place"
        self._retries.note_offer_lost(error, has_started=has_started)
        if self._retries.num_deaths:
            self.leave()  # no replica gives a suspect back
        else:
            self._place.end_turn()
