"""What follows when a request loses its replica: another attempt, or its end.

A request counts its deaths: replicas that were lost while they may have run it, in a row, each
before it had gained much there. A request without any token is a suspect from the first death on: a
prompt kills where it is encoded or prefilled. A text that goes on is one from the second death on,
since one death says little about it. The next replica runs a suspect on probation
(`deployments.replica.probation`), once this ingress has given the go-ahead. If that replica dies,
too, before the probation is over, the suspect is taken for the cause: it fails, and no further
replica gets it. So a prompt that kills its replicas kills two, and an answer that does so three,
while an innocent request must lose as many replicas at its worst moments to be blamed.

Shared by generators and poolers; it knows neither Ray nor HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from deployments.contract.errors import (
    GenerationAbortedError,
    ModelChangedError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import (
    PROBATION_TOKENS_AGAIN,
    GenerationRequest,
    num_tokens_of_probation,
)
from deployments.contract.pooling import PoolingRequest
from serve_app.backends.replicas.replica_errors import (
    RETRY_AFTER_S,
    LostAfterStartError,
    NoReplicaError,
    ReplicaStoppedError,
    unlimited_once_begun,
)
from serve_app.http.request_record import MoveReason, RequestRecord, current_record
from serve_app.http.stream_notices import NOTICE_INTERVAL_S, Notice

T = TypeVar("T")
RequestT = TypeVar("RequestT", GenerationRequest, PoolingRequest)

LOST: Final = (ReplicaUnavailableError, GenerationAbortedError)
"""The errors of an attempt that may succeed at another replica. Any other error is final."""

NUM_STARTS: Final = 2.0
"""A search lasts at least as long as so many of the slowest start: a machine on which a replica
was lost may be busier than it was then.
"""

AskWhy = Callable[[], Awaitable[NoReplicaError | None]]
"""Returns why no replica will run; None if one may."""


async def may_run() -> None:
    """Return no reason."""


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """How long and how often a request looks for another replica.

    Attributes:
        timeout_s: Most seconds from a loss until another replica takes over, or `NUM_STARTS` of
            the model's slowest start if that is more.
        max_moves: How often a request may move.
        first_backoff_s: Seconds before the second attempt to find a replica; doubled after each.
        max_backoff_s: The longest of these waits.
        first_patience_s: Seconds that a lost request waits for a replica to take it or begin with
            it, before it is offered again; doubled after each. A replica that hangs takes nothing,
            and Serve needs a minute or so to kill it.
        notice_interval_s: Seconds between two notices to a client whose stream waits.
    """

    timeout_s: float
    max_moves: int = 8
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    first_patience_s: float = 5.0
    notice_interval_s: float = NOTICE_INTERVAL_S

    def backoffs_s(self) -> Iterator[float]:
        """Yield the waits between attempts, without end."""
        backoff_s = self.first_backoff_s
        while True:
            yield backoff_s
            backoff_s = min(2 * backoff_s, self.max_backoff_s)


@dataclass(slots=True)
class Starts:
    """How long the replicas of a model took to start, as they have told.

    Attributes:
        slowest_s: The longest of these times, in seconds; 0 while none is known.
    """

    slowest_s: float = 0.0

    def note(self, start_s: float) -> None:
        """Note what a replica has told."""
        self.slowest_s = max(self.slowest_s, start_s)


class Retries:
    """The attempts of one request, and the replicas that it has lost.

    Attributes:
        num_moves: How often another replica has taken over.
        is_accepted: Whether a replica had taken the request. From then on it is never refused: it
            waits for room.
    """

    def __init__(
        self,
        limits: FailoverLimits,
        blame: Callable[[str], RaystreamError],
        *,
        starts: Starts | None = None,
        why_none: AskWhy = may_run,
        is_accepted: bool = False,
        starts_at_once: bool = False,
    ) -> None:
        """Start without a loss.

        Args:
            limits: Limits on the search for another replica.
            blame: Makes the error for a request that has killed its replicas.
            starts: How long the model's replicas took to start; None: that is not known.
            why_none: Asked when no replica takes the request.
            is_accepted: See the class.
            starts_at_once: Whether a replica begins without waiting for a go-ahead, so that any
                replica that was lost may have died of the request.
        """
        self.num_moves = 0
        self._starts_at_once = starts_at_once
        self.is_accepted = is_accepted
        self._num_deaths = 0
        self._has_tokens = False
        self._limits = limits
        self._starts = starts or Starts()
        self._blame = blame
        self._why_none = why_none
        self._record: RequestRecord | None = current_record()
        self._give_up_at_s: float | None = None  # by the event loop's clock; None before a search
        self._waits_first = False
        self._reason: MoveReason | None = None  # of the loss that is not made good yet
        self._other_version: ModelChangedError | None = None

    @property
    def num_deaths(self) -> int:
        """The deaths that make the request a suspect; see `GenerationRequest.num_deaths`."""
        return 0 if self._has_tokens and self._num_deaths == 1 else self._num_deaths

    @property
    def is_searching(self) -> bool:
        """Whether it looks for a replica to take over, for a limited time."""
        return self._give_up_at_s is not None

    def noted_in(self, request: RequestT, *, is_planned: bool = False) -> RequestT:
        """Return a request that tells its next replica of the deaths, and its trace of the move.

        Args:
            request: The request.
            is_planned: Whether it moves before anything is lost.
        """
        reason = MoveReason.DRAINED if is_planned else self._reason
        if request.trace is not None and reason is not None:
            request = replace(request, trace=replace(request.trace, moved=reason))
        return replace(request, num_deaths=self.num_deaths) if self.num_deaths else request

    def note_loss(self, error: RaystreamError, *, has_started: bool, num_gained: int = 0) -> None:
        """Note that the latest attempt has lost its replica.

        Args:
            error: One of `LOST`.
            has_started: Whether the replica may have begun with the request. A suspect's replica
                had not unless it had the go-ahead.
            num_gained: Tokens that had come from it since.

        Raises:
            RaystreamError: The request is taken for the cause, or has moved too often.
        """
        if self._reason is None and self.num_moves >= self._limits.max_moves:
            raise ReplicaUnavailableError(
                f"The request has lost {self.num_moves + 1} replicas. Try again later.",
                None,
                RETRY_AFTER_S,
            ) from error
        self.limit_search()
        is_death = _is_death(error)
        if is_death:  # of several losses in one search, a death is told
            self._reason = MoveReason.LOST
        elif self._reason is None:
            self._reason = MoveReason.STOPPED
        # Serve cancels the calls of a client that leaves; we may hear of that before it does.
        self._waits_first = not is_death
        self._note_death(error, has_started=has_started, num_gained=num_gained)

    def note_offer_lost(
        self, error: RaystreamError, *, has_started: bool, num_gained: int = 0
    ) -> None:
        """Note the loss of a replica to which a parked text was offered, or that was to park it.

        It was to wait anyway, so that is no move. A death counts all the same, and a suspect looks
        for a replica like one that was lost.

        Args:
            error: One of `LOST`.
            has_started: See `note_loss`.
            num_gained: See `note_loss`.
        """
        self._note_death(error, has_started=has_started, num_gained=num_gained)
        if self.num_deaths:
            self.limit_search()
            self._reason = MoveReason.LOST

    def _note_death(self, error: RaystreamError, *, has_started: bool, num_gained: int) -> None:
        if not _is_death(error) or not (has_started or self._num_deaths == 0):
            return
        if self._record is not None:
            self._record.num_deaths += 1
        suspected = self.num_deaths
        if suspected and num_gained < num_tokens_of_probation(suspected):
            raise self._blame(
                f"{self._num_deaths + 1} replicas of the model died while they ran this request, "
                "so it is not sent to another. Change it before you send it again."
            ) from error
        self._num_deaths = 1 if num_gained >= PROBATION_TOKENS_AGAIN else self._num_deaths + 1
        self._has_tokens = self._has_tokens or num_gained > 0

    def note_parked(self, num_gained: int) -> None:
        """Note that a replica has given the text back.

        Args:
            num_gained: Tokens that had come from it since.
        """
        self._has_tokens = self._has_tokens or num_gained > 0
        if num_gained >= PROBATION_TOKENS_AGAIN:
            self._num_deaths = 0

    @property
    def _timeout_s(self) -> float:
        """Seconds from a loss until another replica must have taken over.

        Where the lost replica was the only one, the next has to start.
        """
        return max(self._limits.timeout_s, NUM_STARTS * self._starts.slowest_s)

    async def until_taken(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and repeat it while replicas are lost, until one takes the request.

        The first call may take any time. In a search the time is limited, and a refusal ends
        nothing: in a roll-out the router may have picked a replica of another version while those
        of the text's own still run.

        Args:
            call: Sends the request, with the current `num_deaths`, to the replica that the router
                picks; waits while there is none.

        Raises:
            NoReplicaError: None runs, none will, and none was lost.
            ReplicaUnavailableError: No replica took over in time.
            ModelChangedError: The same, and only other versions of the model run.
            RaystreamError: The request was refused, is taken for the cause of the losses, or has
                moved too often.
        """
        waits = self._waits_first
        if not self.is_searching:
            try:
                return await call()
            except NoReplicaError as error:  # nothing was lost
                raise await self._why_none() or error from error
            except LOST as error:
                self._add_attempt(error)
            waits = True
        try:
            async with asyncio.timeout_at(self._give_up_at_s) as timer:
                taken = await self._search(call, waits)
        except TimeoutError:
            if timer.expired():
                raise await self._gave_up() from None
            raise
        self._note_move()
        return taken

    async def _search(self, call: Callable[[], Awaitable[T]], waits: bool) -> T:
        """Make a call until a replica takes the request, waiting longer before each further one.

        Args:
            call: See `until_taken`.
            waits: Whether to wait before the first one, too.
        """
        patience_s = self._limits.first_patience_s
        for backoff_s in self._limits.backoffs_s():
            if waits:
                await asyncio.sleep(backoff_s)
            waits = True
            try:
                async with asyncio.timeout(patience_s) as wait:
                    with unlimited_once_begun(wait):
                        return await call()
            except TimeoutError:
                if not wait.expired():
                    raise
                patience_s *= 2
            except OverloadedError:
                if not self.is_accepted:
                    raise
            except ModelChangedError as error:
                self._other_version = error
            except NoReplicaError:
                pass  # one may start yet
            except LOST as error:
                self._add_attempt(error)
        raise AssertionError("there is no last backoff")

    def limit_search(self) -> None:
        """Limit the time until another replica has to take over, unless that is limited already."""
        if not self.is_searching:
            self._give_up_at_s = asyncio.get_running_loop().time() + self._timeout_s

    def _add_attempt(self, error: RaystreamError) -> None:
        """Note that an attempt has lost its replica before it was taken; see `note_loss`."""
        has_started = self._starts_at_once or isinstance(error, LostAfterStartError)
        self.note_loss(error, has_started=has_started)

    def _note_move(self) -> None:
        self._give_up_at_s, self._waits_first = None, False
        self._other_version = None
        if self._reason is None:  # the text had to leave its replica, and nothing was lost
            return
        self.num_moves += 1
        self._note(self._reason)
        self._reason = None

    def note_planned_move(self) -> None:
        """Note that another replica has taken over before anything was lost."""
        self._note(MoveReason.DRAINED)

    def _note(self, reason: MoveReason) -> None:
        if self._record is not None:
            self._record.moved(reason)

    def parked(self) -> AbstractContextManager[None]:
        """Note that the stream is parked while the block runs."""
        return nullcontext() if self._record is None else self._record.parked()

    def tell(self, notice: Notice) -> None:
        """Tell the client, if it reads a stream."""
        if self._record is not None:
            self._record.on_notice(notice)

    async def _gave_up(self) -> RaystreamError:
        if self._other_version is not None:
            return self._other_version
        why = await self._why_none()
        timeout_s = self._timeout_s
        is_of_file = timeout_s == self._limits.timeout_s
        why_then = "limits.failover_timeout_s" if is_of_file else "twice its slowest start"
        what = (
            "The model's replica was lost, and no other took over"
            if self._reason is not None
            else "The answer had made room for others, and no replica took it again"
        )
        return ReplicaUnavailableError(
            f"{what} within {timeout_s:.4g} s ({why_then}). "
            + ("Try again later." if why is None else why.message),
            None,
            RETRY_AFTER_S,
        )


def _is_death(error: RaystreamError) -> bool:
    """Return whether the replica may have died of the request."""
    return isinstance(error, ReplicaUnavailableError) and not isinstance(
        error, ReplicaStoppedError | NoReplicaError
    )
