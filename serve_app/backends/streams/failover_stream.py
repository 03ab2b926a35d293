"""A stream that outlives its replica.

The stream of a text keeps the token ids that it has passed on. When its replica is lost, it opens
again at whichever replica the router picks, with these ids after the prompt, and goes on after
them. The next token depends only on the tokens before it, the request and (seed, position), and the
replica replays the ids through its grammar, penalties and detokenizer. So what follows is what
would have followed. A delta arrives whole or not at all, with its finish reason: ids without a
finish belong to a text that goes on. The prompt's log-probabilities are counted, too, and the next
replica sends those that are missing.

When its replica is only about to end, the stream opens at the next one first, and then leaves
(`_hand_over`). Between the two it passes nothing on, so that the second one begins exactly where
the first one has ended.

A replica may also give the text back, for others to run: then it is parked (`parking`), and opens
again in the same way when it is its turn. Nothing was lost, so that counts as no move.

`serve_app.backends.streams.retries` decides what follows from a loss.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from deployments.contract.claims import Claim
from deployments.contract.errors import (
    ModelChangedError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest, GenerationStream
from deployments.contract.output import TextDelta
from serve_app.backends.replicas.backend import Backend
from serve_app.backends.replicas.replica_departures import Departures
from serve_app.backends.replicas.replica_errors import (
    LostAfterStartError,
    NoReplicaError,
    ParkedError,
    ReplicaStoppedError,
)
from serve_app.backends.streams.parking import ParkedPlace, ParkingLot
from serve_app.backends.streams.retries import LOST, FailoverLimits, Retries
from serve_app.http.stream_notices import Notice


class FailoverStream:
    """A stream that goes on at another replica when its own is lost."""

    def __init__(
        self,
        backend: Backend,
        request: GenerationRequest,
        stream: GenerationStream,
        retries: Retries,
        limits: FailoverLimits,
        hand_overs: asyncio.Semaphore,
        departures: Departures | None = None,
        lot: ParkingLot | None = None,
    ) -> None:
        """Take over an accepted stream.

        Args:
            backend: Opens the stream again.
            request: The request that `stream` answers.
            stream: The stream at its first replica.
            retries: Knows the replicas that the request has lost until now.
            limits: Limits on the search for another replica.
            hand_overs: Held while the stream opens at another replica before it leaves its own.
            departures: See `Failover`.
            lot: Takes the stream while it is parked; None if no replica gives it back.
        """
        self.accepted = stream.accepted
        self._backend = backend
        self._request = request
        self._retries = retries
        self._limits = limits
        self._hand_overs = hand_overs
        self._departures = departures
        self._lot = lot
        self._place: ParkedPlace | None = None  # while it is parked, until it goes on
        self._parked = ExitStack()  # closing it ends what is counted of that time
        self._waited_until_s = 0.0
        self._patience_s = limits.first_patience_s  # with a replica to which it is offered
        self._may_park = lot is not None
        self._waited_s = request.claim.waited_s
        self._now_s = asyncio.get_running_loop().time
        self._last_s = self._now_s()  # of what came last, or of leaving the lot
        self._told_s = 0.0  # of the latest notice
        self._watch = ExitStack()  # closing it ends the watch on the stream's replica
        self._token_ids = list(request.generated_token_ids)
        self._num_prompt_logprobs = request.num_prompt_logprobs
        self._is_ended = False  # finished, failed or closed: a loss no longer matters
        self._loss: RaystreamError | None = None
        self._opening: asyncio.Task[None] | None = None
        self._handing_over: asyncio.Task[None] | None = None
        self._is_holding = False  # nothing is passed on: the next replica takes over from here
        self._may_leave = True
        self._begin(stream)

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    @property
    def waited_until_s(self) -> float:
        """When it last stopped waiting to go on elsewhere; see `GenerationStream`.

        While a replica is asked to take it, it does not wait: one that hangs holds up the answer.
        """
        is_parked = self._place is not None and not self._place.is_offered
        return self._now_s() if is_parked or self._retries.is_searching else self._waited_until_s

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call.

        Raises:
            GenerationFailedError: The request is taken for the cause of its replicas' deaths.
            RaystreamError: See `GenerationStream.__aiter__` and `Retries.until_taken`.
        """
        while True:
            if self._loss is not None:
                await self._move(self._loss)
            stream = self._stream
            try:
                deltas = await anext(self._deltas)
            except (*LOST, ParkedError) as error:
                if self._is_ended:
                    raise StopAsyncIteration from error
                if not await self._has_left(stream):
                    self._loss = error
            except RaystreamError:
                self._end()
                raise
            else:
                is_held = self._is_holding and not any(map(_has_ended, deltas))
                if stream is not self._stream or (is_held and await self._has_left(stream)):
                    continue  # the next replica sends them
                if kept := self._keep(deltas):
                    return kept

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended, wherever it is; closing twice is harmless."""
        openings = [each for each in (self._opening, self._handing_over) if each is not None]
        self._end()
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        await self._stream.aclose()

    def _end(self) -> None:
        """Note that nothing follows."""
        self._is_ended = True
        self._stay()
        self._watch.close()
        self._leave_lot()

    def _begin(self, stream: GenerationStream) -> None:
        """Read from this stream from here on."""
        self._stream = stream
        self._deltas = aiter(stream)
        self._watch.close()
        if self._departures is not None:
            replica_id = stream.accepted.replica_id
            self._watch.callback(self._departures.watch(replica_id, self._leave))
        self._num_before = len(self._token_ids)  # tokens that came before this stream
        self._is_first_message = True

    def _keep(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """Remember what deltas bring; return those to pass on."""
        if not deltas:
            return deltas
        now_s = self._now_s()
        if self._is_first_message:
            self._is_first_message = False
            self._leave_lot()
            has_begun = self._num_before or self._num_prompt_logprobs
            if has_begun and deltas[0].num_cached_tokens:
                # The first stream has told how much of the prompt was cached.
                deltas = [replace(deltas[0], num_cached_tokens=0), *deltas[1:]]
        self._last_s = now_s
        for delta in deltas:
            self._token_ids += delta.token_ids
            if delta.prompt_logprobs:
                self._num_prompt_logprobs += sum(map(len, delta.prompt_logprobs))
            if _has_ended(delta):
                self._end()
        return deltas

    async def _move(self, loss: RaystreamError) -> None:
        """Go on at another replica, or at any if this one has parked the stream.

        Raises:
            RaystreamError: See `Retries.note_loss` and `Retries.until_taken`.
        """
        self._loss = None
        self._stay()
        self._watch.close()
        await self._stream.aclose()
        was_parked = isinstance(loss, ParkedError)
        was_offered = self._place is not None  # and nothing has come since
        num_gained = len(self._token_ids) - self._num_before
        num_moves = self._retries.num_moves
        try:
            if was_parked:
                self._retries.note_parked(num_gained)
                self._park()
            elif was_offered:
                self._note_offer_lost(loss, has_started=True)
            else:
                self._retries.note_loss(loss, has_started=True, num_gained=num_gained)
            was_parked = was_parked or was_offered
            self._opening = asyncio.ensure_future(self._open_again())
            await self._wait_for(self._opening, Notice.PARKED if was_parked else Notice.WAITING)
        except RaystreamError:
            self._end()
            raise
        self._opening = None
        if self._retries.num_moves > num_moves:
            self._retries.tell(Notice.MOVED)

    def _park(self) -> None:
        """Take a place among the parked streams; without one, the stream goes on as a lost one."""
        if self._place is not None:  # no replica had a turn for it
            self._place.end_turn()
            if self._now_s() - self._told_s >= self._limits.notice_interval_s:
                self._tell(Notice.PARKED)
            return
        assert self._lot is not None, "no replica parks a stream that has no lot"
        silent_s = self._now_s() - self._last_s  # in the replica, which it had to leave
        claim = replace(self._request.claim, waited_s=self._waited_s + silent_s)
        self._place = self._lot.enter(claim)
        self._may_park = self._place is not None
        self._parked.enter_context(self._retries.parked())
        self._tell(Notice.PARKED)

    def _leave_lot(self) -> None:
        """Note that the stream goes on, has ended, or is looked after like a lost one."""
        self._parked.close()
        if self._place is not None:
            self._waited_s += self._silent_s
            self._last_s = self._now_s()
            self._place.leave()
            self._place = None
            self._patience_s = self._limits.first_patience_s

    async def _wait_for(self, opening: asyncio.Task[None], notice: Notice) -> None:
        """Wait until the stream is open again, and tell the client so from time to time."""
        try:
            while not (await asyncio.wait([opening], timeout=self._limits.notice_interval_s))[0]:
                self._tell(notice)
        finally:
            opening.cancel()  # if the reader was cancelled; `aclose` waits for the end
        if self._is_ended:  # closed meanwhile
            raise StopAsyncIteration
        opening.result()

    async def _open_again(self) -> None:
        while self._place is not None:
            await self._place.wait_for_turn()
            self._waited_until_s = self._now_s()
            taken = await self._offer(self._place)
            if taken is not None:
                self._begin(taken)
                return
        self._retries.limit_search()
        taken = await self._retries.until_taken(self._send_again)
        self._waited_until_s = self._now_s()
        self._begin(taken)

    async def _offer(self, place: ParkedPlace) -> GenerationStream | None:
        """Offer the parked stream to a replica; None if it waits again, or has left the lot."""
        try:
            async with asyncio.timeout(self._patience_s) as timer:
                taken = await self._send_again()
        except TimeoutError:
            if not timer.expired():
                raise
            self._patience_s *= 2
            place.end_turn()
        except OverloadedError:
            place.end_turn()
        except (NoReplicaError, ModelChangedError):
            self._leave_lot()  # others may be of the version that runs
        except LOST as error:
            self._note_offer_lost(error, has_started=isinstance(error, LostAfterStartError))
        else:
            place.note_taken(self._limits.first_patience_s)
            return taken
        return None

    def _note_offer_lost(self, error: RaystreamError, *, has_started: bool) -> None:
        """Wait again after a replica to which the parked stream was offered was lost."""
        assert self._place is not None, "it is offered from its place"
        self._retries.note_offer_lost(error, has_started=has_started)
        if self._retries.num_deaths:
            self._leave_lot()  # no replica gives a suspect back
        else:
            self._place.end_turn()

    async def _send_again(self) -> GenerationStream:
        return await self._backend.send(self._resumption())

    def _tell(self, notice: Notice) -> None:
        """Tell the client why it waits."""
        self._told_s = self._now_s()
        self._retries.tell(notice)

    @property
    def _claim(self) -> Claim:
        """The request's, with what it has waited for its turns after its first one."""
        return replace(self._request.claim, waited_s=self._waited_s + self._silent_s)

    @property
    def _silent_s(self) -> float:
        """Seconds since something came, if the stream is parked."""
        return 0.0 if self._place is None else self._now_s() - self._last_s

    def _resumption(self, *, is_planned: bool = False) -> GenerationRequest:
        """Return the request for the rest of the text; it no longer belongs to a group."""
        return replace(
            self._retries.noted_in(self._request, is_planned=is_planned),
            generated_token_ids=tuple(self._token_ids),
            num_prompt_logprobs=self._num_prompt_logprobs,
            is_resumed=True,
            is_planned=is_planned,
            fingerprint=self.accepted.fingerprint,
            group=None,
            claim=self._claim,
            may_park=self._may_park,
            is_parked=self._place is not None and not is_planned,
        )

    def _leave(self) -> None:
        """Try to go on at another replica; called again while that has not worked.

        A suspect stays: it would run at two replicas at once, and might kill both.
        """
        is_busy = self._handing_over or self._opening or self._loss or self._is_ended
        if self._may_leave and not is_busy and not self._retries.num_deaths:
            self._handing_over = asyncio.ensure_future(self._hand_over(self._stream))
            self._handing_over.add_done_callback(self._note_end_of_hand_over)

    def _stay(self) -> None:
        """Give up what `_leave` has begun."""
        if self._handing_over is not None:
            self._handing_over.cancel()

    def _note_end_of_hand_over(self, _: asyncio.Task[None]) -> None:
        self._handing_over, self._is_holding = None, False

    async def _hand_over(self, old: GenerationStream) -> None:
        """Open the stream at another replica and leave this one, or stay if none takes it.

        Nothing was lost, so this is no death and not one of the bounded moves.
        """
        async with self._hand_overs:
            self._is_holding = True
            try:
                async with asyncio.timeout(self._limits.first_patience_s):
                    new = await self._backend.send(self._resumption(is_planned=True))
            except (ReplicaStoppedError, NoReplicaError, TimeoutError):
                return
            except RaystreamError as error:
                # The other replica may have died of the request, which its own one still runs.
                self._may_leave = not isinstance(error, ReplicaUnavailableError)
                return
        self._begin(new)
        self._retries.note_planned_move()
        self._retries.tell(Notice.MOVED)
        await old.aclose()

    async def _has_left(self, stream: GenerationStream) -> bool:
        """Return whether the text goes on elsewhere than in a stream; wait while that is open."""
        if self._is_holding and self._handing_over is not None:
            await asyncio.wait([self._handing_over])
        return stream is not self._stream


def _has_ended(delta: TextDelta) -> bool:
    """Return whether a text has ended or failed with a delta."""
    return delta.finish_reason is not None or delta.error is not None
