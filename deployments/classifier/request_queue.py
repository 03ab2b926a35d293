"""The line in front of the device: who may wait, and all that waits in one grasp.

A request is counted from its arrival, before anything is done for it, so that a refusal costs next
to nothing; its tokens are counted once they are known. What the device has taken waits no more, and
neither does the oldest in line while the device is idle: it is about to be taken.

The event loop lets requests in and out, the device's thread takes them; one lock keeps the limits
exact between the two.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.drain_rate import DrainRate
from deployments.errors import InvalidRequestError, OverloadedError, ReplicaUnavailableError

TokenIds = tuple[int, ...]
Probabilities = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LineLimits:
    """How much may wait.

    Attributes:
        max_queued_requests: Requests that wait for the device, whatever their number of texts.
        max_queued_tokens: Tokens of those requests; None counts the requests alone.
    """

    max_queued_requests: int
    max_queued_tokens: int | None


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way through the replica.

    Attributes:
        sequences: Its texts, encoded; none before they are.
        num_tokens: Of all of them.
        has_left: Whether nobody waits for the answer any more.
        answer: The probabilities of each text's labels, or why there are none.
    """

    sequences: tuple[TokenIds, ...] = ()
    num_tokens: int = 0
    has_left: bool = False
    answer: "Future[list[Probabilities]]" = field(default_factory=Future)


class WaitingLine:
    """The requests of one replica."""

    def __init__(self, limits: LineLimits, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start with nobody in line.

        Args:
            limits: How much may wait.
            now_s: The time, in seconds that never run backwards.
        """
        self._limits = limits
        self._now_s = now_s
        self._changed = threading.Condition()
        self._waiting: dict[Job, None] = {}  # a set that keeps its order, oldest first
        self._running: set[Job] = set()
        self._drain_rate = DrainRate()
        self._is_poked = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and that the device has not taken."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that the device has taken and not answered.

        Those that are answered leave the line when the event loop comes to them.
        """
        with self._changed:
            return sum(not job.answer.done() for job in self._running)

    @property
    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._is_closed

    def set_limits(self, limits: LineLimits) -> None:
        """Let more or less wait from now on; nobody who waits is sent away."""
        with self._changed:
            self._limits = limits

    @contextmanager
    def place(self) -> Iterator[Job]:
        """Hold a place for one request, from its arrival to its end.

        Raises:
            OverloadedError: As many requests wait as may.
            ReplicaUnavailableError: The device's worker has ended.
        """
        job = Job()
        self._enter(job)
        try:
            yield job
        finally:
            self._leave(job)

    def put(self, job: Job, sequences: tuple[TokenIds, ...]) -> None:
        """Let the device take a request, now that it is encoded.

        Raises:
            InvalidRequestError: It has more tokens than may ever wait.
            OverloadedError: With it, too many tokens would wait.
            ReplicaUnavailableError: The device's worker has ended.
        """
        num_tokens = sum(map(len, sequences))
        with self._changed:
            self._check_open()
            self._check_tokens(num_tokens)
            job.sequences, job.num_tokens = sequences, num_tokens
            self._changed.notify_all()

    def take_all(self) -> list[Job] | None:
        """Wait for work and return all of it; None once the line is closed.

        The list is empty if the device was poked while nobody waited.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._is_poked or self._is_closed)
            if self._is_closed:
                return None
            self._is_poked = False
            ready = self._ready()
            for job in ready:
                del self._waiting[job]
            taken = [job for job in ready if job.answer.set_running_or_notify_cancel()]
            self._running.update(taken)
            return taken

    def poke(self) -> None:
        """Have `take_all` return, even if it is with nothing."""
        with self._changed:
            self._is_poked = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and have `take_all` return None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Tell all that are in line, or were taken, that there will be no answer.

        The device's thread alone may call this, once the line is closed.
        """
        with self._changed:
            assert self._is_closed, "somebody may still enter"
            waiting = [job for job in self._waiting if job.answer.set_running_or_notify_cancel()]
            for job in (*waiting, *self._running):
                if not job.answer.done():
                    job.answer.set_exception(error)

    def _ready(self) -> list[Job]:
        return [job for job in self._waiting if job.sequences]

    def _enter(self, job: Job) -> None:
        with self._changed:
            self._check_open()
            if not self._waiting and not self._running:
                self._drain_rate.start(self._now_s())
            limit = self._limits.max_queued_requests
            # With this one; an idle device is about to take the oldest.
            num_queued = len(self._waiting) + (1 if self._running else 0)
            if num_queued > limit:
                why = f"{len(self._waiting)} requests wait (max_queued_requests is {limit})"
                raise self._overloaded(why)
            self._waiting[job] = None

    def _leave(self, job: Job) -> None:
        with self._changed:
            job.has_left = True
            self._waiting.pop(job, None)
            self._running.discard(job)
            if job.num_tokens:  # else it was refused, and never held anybody up
                self._drain_rate.note_end(self._now_s())

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReplicaUnavailableError("The classifier's worker has ended; try again.")

    def _check_tokens(self, num_new: int) -> None:
        limit = self._limits.max_queued_tokens
        if limit is None:
            return
        if num_new > limit:
            raise InvalidRequestError(
                f"The request has {num_new} tokens, and the model lets {limit} wait "
                "(max_queued_tokens); send fewer texts at once.",
                "input",
            )
        tokens = [*(job.num_tokens for job in self._waiting if job.sequences), num_new]
        num_queued = sum(tokens if self._running else tokens[1:])
        if num_queued > limit:
            why = f"{sum(tokens[:-1])} tokens wait (max_queued_tokens is {limit})"
            raise self._overloaded(why)

    def _overloaded(self, why: str) -> OverloadedError:
        # All that waits is taken at once, so there is room as soon as what runs has ended.
        return self._drain_rate.overloaded(max(1, len(self._running)), why, self._now_s())
