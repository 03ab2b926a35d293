"""The queue in front of the device, which limits what may wait and hands it out.

A request is counted from its arrival, before any work is done for it, so that a refusal costs
almost nothing. Its tokens are counted once they are known. Requests that the device has taken do
not count as waiting; nor does the oldest request while the device is idle, since it is about to be
taken.

What is handed out is everything that waits, unless other tenants or priorities come meanwhile: then
the best priority is next, and of its tenants the one that got least (`contract.claims`). If too
many requests or tokens wait, a tenant that uses less than its share of the queue gets the room of
the newest request of the tenant that is furthest beyond its own; that one is refused.

The event loop adds and removes requests, and the device's thread takes them. One lock keeps the
limits exact between the two.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from deployments.contract.claims import (
    NO_CLAIM,
    PRIORITY_AGING_S,
    Claim,
    FairShares,
    TenantService,
    cost,
)
from deployments.contract.errors import (
    InvalidRequestError,
    OverloadedError,
    OverloadReason,
    ReplicaUnavailableError,
)
from deployments.plan.replica_report import NO_WAITS, Waits
from deployments.replica.retry_after import RetryEstimator

TokenIds = tuple[int, ...]
Row = bytes
"""The numbers that answer a text; see `PooledText`."""


class TurnOverError(Exception):
    """The model's turn on its device was over before the request's texts were computed."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on what may wait.

    Attributes:
        max_queued_requests: HTTP requests that wait for the device; each counts once, whatever its
            number of texts.
        max_queued_tokens: Tokens of the waiting requests; None means no limit on tokens.
    """

    max_queued_requests: int
    max_queued_tokens: int | None


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way through the replica.

    Attributes:
        claim: What it may claim beside the others.
        sequences: Its encoded texts; empty until they are encoded.
        type_ids: Which of a pair's texts each token of a sequence belongs to; None for a sequence
            if all belong to the first, empty if that is so for all sequences.
        num_tokens: Tokens of all its texts.
        came_s: When it came, by the queue's clock.
        has_left: Whether the client no longer waits for the answer.
        taken_s: When the device took it, by the queue's clock; None until then.
        has_begun: Whether the device has begun to compute one of its texts. Set by what has taken
            the job.
        on_leave: Called once the client no longer waits; None if nothing runs for it. Set by what
            has taken the job.
        answer: The row of each text, or the error.
    """

    claim: Claim = field(default_factory=Claim)
    sequences: tuple[TokenIds, ...] = ()
    type_ids: tuple[TokenIds | None, ...] = ()
    num_tokens: int = 0
    came_s: float = 0.0
    has_left: bool = False
    taken_s: float | None = None
    has_begun: bool = False
    on_leave: Callable[[], None] | None = None
    answer: "Future[list[Row]]" = field(default_factory=Future)

    def require_room(self) -> None:
        """Raise if it has made room for another tenant's.

        Raises:
            OverloadedError: It has.
        """
        if self.answer.done():
            self.answer.result()


class RequestQueue:
    """The waiting and running requests of one replica."""

    def __init__(
        self,
        limits: QueueLimits,
        now_s: Callable[[], float] = time.monotonic,
        *,
        priority_aging_s: float = PRIORITY_AGING_S,
    ) -> None:
        """Start empty.

        Args:
            limits: Limits on what may wait.
            now_s: Returns the time of a monotonic clock, in seconds.
            priority_aging_s: Seconds of waiting that are worth one step of priority.
        """
        self._priority_aging_s = priority_aging_s
        self._limits = limits
        self._now_s = now_s
        self._changed = threading.Condition()
        self._waiting: dict[Job, None] = {}  # a set that keeps its order, oldest first
        # Those of them that are encoded, by `Claim.queue`.
        self._ready: dict[tuple[int, str], dict[Job, None]] = {}
        self._num_waiting_tokens = 0
        self._running: set[Job] = set()
        self._shares = FairShares()  # of those that wait or run
        self._retry_estimator = RetryEstimator()
        self._is_poked = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and that the device has not yet taken."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that the device has taken and not yet answered.

        An answered request leaves `_running` only when the event loop runs its task.
        """
        with self._changed:
            return sum(not job.answer.done() for job in self._running)

    @property
    def num_running_tokens(self) -> int:
        """Tokens of the running requests."""
        with self._changed:
            return sum(job.num_tokens for job in self._running if not job.answer.done())

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests that are encoded."""
        return self._num_waiting_tokens

    @property
    def waits(self) -> Waits:
        """How long requests wait, and how far their tenants' services are apart."""
        with self._changed:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return NO_WAITS
            longest_s = self._now_s() - oldest.came_s
            return Waits(longest_s=longest_s, service_gap_tokens=self._shares.gap)

    def of_tenants(self, max_tenants: int) -> tuple[TenantService, ...]:
        """Return what tenants got; see `FairShares`."""
        with self._changed:
            return self._shares.of_tenants(max_tenants)

    @property
    def refused(self) -> float:
        """Requests that were refused lately, as a part of those that may be here."""
        with self._changed:
            num_refused = self._retry_estimator.num_refused(self._now_s())
            return num_refused / (self._limits.max_queued_requests + 1)

    @property
    def limits(self) -> QueueLimits:
        """The limits on what may wait."""
        return self._limits

    @property
    def is_closed(self) -> bool:
        """Whether the queue accepts no more requests."""
        return self._is_closed

    def set_limits(self, limits: QueueLimits) -> None:
        """Replace the limits; requests that already wait stay."""
        with self._changed:
            self._limits = limits

    @contextmanager
    def entered(self, claim: Claim | None = None) -> Iterator[Job]:
        """Hold room for one request, from its arrival to its end.

        Args:
            claim: The request's; None claims nothing beside others.

        Raises:
            OverloadedError: The limit of waiting requests is reached.
            ReplicaUnavailableError: The device's worker has ended.
        """
        job = Job(claim or NO_CLAIM, came_s=self._now_s())
        self._enter(job)
        try:
            yield job
        finally:
            self._leave(job)

    def put(
        self,
        job: Job,
        sequences: tuple[TokenIds, ...],
        type_ids: tuple[TokenIds | None, ...] = (),
    ) -> None:
        """Make an encoded request available to the device; see `Job`.

        Raises:
            InvalidRequestError: It has more tokens than `max_queued_tokens`.
            OverloadedError: Too many tokens would wait, or the request has made room for another.
            ReplicaUnavailableError: The device's worker has ended.
        """
        num_tokens = sum(map(len, sequences))
        with self._changed:
            self._check_open()
            job.require_room()
            self._check_tokens(job.claim, num_tokens)
            job.sequences, job.type_ids, job.num_tokens = sequences, type_ids, num_tokens
            self._num_waiting_tokens += num_tokens
            if sequences:
                self._ready.setdefault(job.claim.queue, {})[job] = None
            self._changed.notify_all()

    def take_all(self) -> list[Job] | None:
        """Wait for requests and return all of them, in order; None once the queue is closed.

        The list is empty if `poke` was called while no request was ready.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_poked or self._is_closed)
            if self._is_closed:
                return None
            self._is_poked = False
            return self._take(list(self._ready))

    def take_others(self, queues: Collection[tuple[int, str]]) -> list[Job]:
        """Return what waits of all other tenants and priorities than these, without waiting.

        Args:
            queues: See `Claim.queue`.
        """
        with self._changed:
            return self._take([queue for queue in self._ready if queue not in queues])

    def in_order(self, came_s: Mapping[tuple[int, str], float]) -> list[tuple[int, str]]:
        """Sort tenants and priorities: first the best priority, then the tenant that got least.

        As at a model that generates (`ClaimQueue`), a request goes before one of the next better
        priority that came `priority_aging_s` later.

        Args:
            came_s: When the oldest of each came; see `Claim.queue`.
        """
        with self._changed:
            return sorted(came_s, key=self._order_of(came_s))

    def charge(self, computed: Iterable[tuple[Claim, int]]) -> None:
        """Count the tokens of texts that the device computes, each with its request's claim."""
        with self._changed:
            for claim, num_tokens in computed:
                self._shares.charge(claim, cost(num_tokens))

    def _take(self, queues: Iterable[tuple[int, str]]) -> list[Job]:
        """Return what waits of these tenants and priorities, in their order, then by arrival."""
        ready = [job for queue in queues for job in self._ready.pop(queue)]
        for job in ready:
            del self._waiting[job]
            self._num_waiting_tokens -= job.num_tokens
        taken = [job for job in ready if job.answer.set_running_or_notify_cancel()]
        self._running.update(taken)
        now_s, came_s = self._now_s(), dict[tuple[int, str], float]()
        for job in taken:
            job.taken_s = now_s
            came_s[job.claim.queue] = min(job.came_s, came_s.get(job.claim.queue, job.came_s))
        order = self._order_of(came_s)
        ranks = {queue: order(queue) for queue in came_s}
        return sorted(taken, key=lambda job: (ranks[job.claim.queue], job.came_s))

    def _order_of(
        self, came_s: Mapping[tuple[int, str], float]
    ) -> Callable[[tuple[int, str]], tuple[float, int, float]]:
        """Return what tenants and priorities are sorted by."""
        oldest_s: dict[int, float] = {}
        for (priority, _), since_s in came_s.items():
            oldest_s[priority] = min(since_s, oldest_s.get(priority, since_s))

        def order(queue: tuple[int, str]) -> tuple[float, int, float]:
            priority, tenant = queue
            due_s = oldest_s[priority] + priority * self._priority_aging_s
            return due_s, priority, self._shares.counter(tenant)

        return order

    def poke(self) -> None:
        """Make `take_all` return, even without requests."""
        with self._changed:
            self._is_poked = True
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more requests, and make `take_all` return None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Fail all waiting and running requests.

        Only the device's thread may call this, or another one if it hangs; the queue must be
        closed.
        """
        with self._changed:
            assert self._is_closed, "a request may still enter"
            pending = [job for job in (*self._waiting, *self._running) if not job.answer.done()]
            for job in pending:
                self._fail(job, error)

    def give_back(self, *, begun: bool = False) -> None:
        """End encoded requests with `TurnOverError`, since the device has no model for them.

        Args:
            begun: Whether also those that the device has begun with; else they go on.
        """
        with self._changed:
            ready = [job for jobs in self._ready.values() for job in jobs]
            for job in ready:
                self._remove(job)
            taken = [job for job in self._running if begun or not job.has_begun]
            for job in (*ready, *taken):
                # A thread of the device may end it at the same time.
                with suppress(InvalidStateError):
                    self._fail(job, TurnOverError())

    def _fail(self, job: Job, error: Exception) -> None:
        if job in self._running or job.answer.set_running_or_notify_cancel():
            job.answer.set_exception(error)

    def _enter(self, job: Job) -> None:
        with self._changed:
            self._check_open()
            if not self._waiting and not self._running:
                self._retry_estimator.start(self._now_s())
            limit = self._limits.max_queued_requests
            # Count the new request too; an idle device is about to take the oldest.
            num_queued = len(self._waiting) + (1 if self._running else 0)
            if num_queued > limit:
                why = f"{len(self._waiting)} requests wait (max_queued_requests is {limit})"
                sizes = dict.fromkeys(self._waiting, 1)
                self._make_room(job.claim, 1, limit, sizes, self._overloaded(why))
            self._waiting[job] = None
            self._shares.enter(job.claim)

    def _leave(self, job: Job) -> None:
        with self._changed:
            job.has_left = True
            self._remove(job)
            self._running.discard(job)
            self._shares.leave(job.claim)
            if job.on_leave is not None:
                job.on_leave()
            if job.num_tokens:  # otherwise it was refused and took no device time
                self._retry_estimator.note_end(self._now_s())

    def _remove(self, job: Job) -> None:
        """Let a request wait no longer, if it does."""
        if job not in self._waiting:
            return
        del self._waiting[job]
        self._num_waiting_tokens -= job.num_tokens
        ready = self._ready.get(job.claim.queue, {})
        ready.pop(job, None)
        if not ready:
            self._ready.pop(job.claim.queue, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReplicaUnavailableError("The model's worker has ended; try again.")

    def _check_tokens(self, claim: Claim, num_new: int) -> None:
        limit = self._limits.max_queued_tokens
        if limit is None:
            return
        if num_new > limit:
            raise InvalidRequestError(
                f"The request has {num_new} tokens, and at most {limit} may wait for the model "
                "(max_queued_tokens); send fewer texts at once.",
                "input",
            )
        num_queued = self._num_waiting_tokens + num_new
        if not self._running:  # the oldest is about to be taken
            encoded = (job.num_tokens for job in self._waiting if job.sequences)
            num_queued -= next(encoded, num_new)
        if num_queued > limit:
            why = f"{self._num_waiting_tokens} tokens wait (max_queued_tokens is {limit})"
            sizes = {job: job.num_tokens for job in self._waiting}
            refusal = self._overloaded(why, OverloadReason.TOKENS)
            self._make_room(claim, num_queued - limit, limit, sizes, refusal)

    def _make_room(
        self,
        claim: Claim,
        num_missing: int,
        limit: int,
        sizes: Mapping[Job, int],
        refusal: OverloadedError,
    ) -> None:
        """Refuse waiting requests for the sake of one, or that itself; see `FairShares.to_go`.

        Args:
            claim: The request's.
            num_missing: How much room is missing.
            limit: How much may wait.
            sizes: The room that each waiting request takes; one without a size is left.
            refusal: What the refused are told.
        """
        waiting = [(job, job.claim, size) for job, size in sizes.items() if size]
        to_go = self._shares.to_go(claim, num_missing, limit, waiting)
        if not to_go:
            raise refusal
        for job in to_go:
            self._remove(job)
            if job.answer.set_running_or_notify_cancel():
                job.answer.set_exception(OverloadedError(*refusal.args))

    def _overloaded(
        self, why: str, reason: OverloadReason = OverloadReason.REQUESTS
    ) -> OverloadedError:
        # The device takes all waiting requests at once, so there is room once the running ones end.
        num_to_end = max(1, len(self._running))
        return self._retry_estimator.overloaded(num_to_end, why, self._now_s(), reason)
