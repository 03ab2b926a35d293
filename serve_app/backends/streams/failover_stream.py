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

A replica may also give the text back, for others to run: then it is parked (`stream_parking`), and
opens again in the same way when it is its turn. Nothing was lost, so that counts as no move. All
texts of a model are parked in the same way when its turn on the device is over.

`serve_app.backends.streams.retries` decides what follows from a loss.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from deployments.contract.errors import (
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest, GenerationStream
from deployments.contract.output import Delivered, TextDelta
from serve_app.backends.replicas.backend import Backend
from serve_app.backends.replicas.replica_departures import Departure, Departures
from serve_app.backends.replicas.replica_errors import (
    NoReplicaError,
    ParkedError,
    ReplicaStoppedError,
)
from serve_app.backends.streams.parking import ParkingLot
from serve_app.backends.streams.retries import LOST, FailoverLimits, Retries
from serve_app.backends.streams.stream_parking import StreamParking
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
        self._parking = StreamParking(lot, request.claim, retries, limits)
        self._searched_until_s = 0.0  # for a replica, after the latest search
        self._now_s = asyncio.get_running_loop().time
        self._told_s = 0.0  # of the latest notice
        self._watch = ExitStack()  # closing it ends the watch on the stream's replica
        self._delivered = Delivered(
            request.generated_token_ids,
            request.num_prompt_logprobs,
            has_told_cached=bool(request.generated_token_ids or request.num_prompt_logprobs),
        )
        self._is_ended = False  # finished, failed or closed: a loss no longer matters
        self._loss: RaystreamError | None = None
        self._opening: asyncio.Task[None] | None = None
        self._handing_over: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None  # kept, since the event loop keeps none
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
        if self._retries.is_searching:
            return self._now_s()
        return max(self._searched_until_s, self._parking.waited_until_s)

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
                if not await self._has_left(stream) and self._loss is None:
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
        self._is_ended, self._loss = True, None
        self._stay()
        self._watch.close()
        self._parking.leave()

    def _begin(self, stream: GenerationStream) -> None:
        """Read from this stream from here on."""
        self._stream = stream
        self._deltas = aiter(stream)
        self._watch.close()
        if self._departures is not None:
            replica_id = stream.accepted.replica_id
            self._watch.callback(self._departures.watch(replica_id, self._depart))
        self._delivered.begin_run()

    def _keep(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """Remember what deltas bring; return those to pass on."""
        if not deltas:
            return deltas
        self._parking.note_message()
        if any(map(_has_ended, deltas)):
            self._end()
        return [self._delivered.add(delta) for delta in deltas]

    async def _move(self, loss: RaystreamError) -> None:
        """Go on at another replica, or at any if this one has parked the stream.

        Raises:
            RaystreamError: See `Retries.note_loss` and `Retries.until_taken`.
        """
        self._loss = None
        self._stay()
        self._watch.close()
        await self._stream.aclose()
        num_gained, num_moves = self._delivered.num_gained, self._retries.num_moves
        notice = Notice.PARKED
        try:
            if isinstance(loss, ParkedError):
                self._retries.note_parked(num_gained)
                self._park()
            elif self._parking.is_parked:  # it was offered, and nothing has come since
                self._parking.note_lost(loss, has_started=True)
            elif await self._is_turn_over():  # its replica was to stop anyway
                if self._is_ended:  # closed meanwhile
                    raise StopAsyncIteration
                self._retries.note_offer_lost(loss, has_started=True, num_gained=num_gained)
                if not self._retries.num_deaths:  # a suspect looks for a replica like a lost one
                    self._park()
            else:
                self._retries.note_loss(loss, has_started=True, num_gained=num_gained)
                notice = Notice.WAITING
            self._opening = asyncio.ensure_future(self._open_again())
            await self._wait_for(self._opening, notice)
        except RaystreamError:
            self._end()
            raise
        self._opening = None
        if self._retries.num_moves > num_moves:
            self._retries.tell(Notice.MOVED)

    def _park(self) -> None:
        is_new = self._parking.park()
        if not self._parking.is_parked:  # the lot is full
            self._retries.limit_search()
        if is_new or self._now_s() - self._told_s >= self._limits.notice_interval_s:
            self._tell(Notice.PARKED)

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
        while self._parking.is_parked:
            await self._parking.wait_for_turn()
            offered = await self._parking.offer(self._send_again)
            if offered is not None:
                self._begin(offered)
                return
        self._retries.limit_search()
        taken = await self._retries.until_taken(self._send_again)
        self._searched_until_s = self._now_s()
        self._begin(taken)

    async def _send_again(self) -> GenerationStream:
        return await self._backend.send(self._resumption())

    def _tell(self, notice: Notice) -> None:
        """Tell the client why it waits."""
        self._told_s = self._now_s()
        self._retries.tell(notice)

    def _resumption(self, *, is_planned: bool = False) -> GenerationRequest:
        """Return the request for the rest of the text; it no longer belongs to a group."""
        return replace(
            self._retries.noted_in(self._request, is_planned=is_planned),
            generated_token_ids=tuple(self._delivered.token_ids),
            num_prompt_logprobs=self._delivered.num_prompt_logprobs,
            is_resumed=True,
            is_planned=is_planned,
            fingerprint=self.accepted.fingerprint,
            group=None,
            claim=self._parking.claim,
            may_park=self._parking.may_park,
            is_parked=self._parking.is_parked and not is_planned,
        )

    def _depart(self, departure: Departure) -> None:
        """Leave the replica, which is about to end; called again while that has not worked.

        A suspect does not go on elsewhere: it would run at two replicas at once, and might kill
        both.
        """
        if self._handing_over or self._opening or self._loss or self._is_ended:
            return
        if departure is Departure.PARK:
            if self._parking.keep_place():  # else it runs on, for as long as the replica may take
                self._loss = ParkedError("The model's turn on its device is over.")
                # At once: a slow client may not read for long, and the next model waits.
                self._closing = asyncio.ensure_future(self._stream.aclose())
        elif self._may_leave and not self._retries.num_deaths:
            self._handing_over = asyncio.ensure_future(self._hand_over(self._stream))
            self._handing_over.add_done_callback(self._note_end_of_hand_over)

    async def _is_turn_over(self) -> bool:
        return (
            self._departures is not None
            and self._parking.has_room
            and await self._departures.is_turn_over(self._stream.accepted.replica_id)
        )

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
