"""Admission: which sequences may run on a replica, which may wait, and which are refused.

Each sequence holds a permit from its arrival to its end. As many sequences run as there are KV
slots. A limited number of sequences and tokens may wait, in the order of the engine's own queue:
resumed sequences first, then the oldest. All ingress replicas share this admission, so their number
does not change the limits. It runs only on the replica's event loop and needs no lock.

A sequence is counted before any work is done for it, so that a refusal costs almost nothing. Its
tokens are counted once they are known. The sequences of one HTTP request (several answers, several
prompts) are admitted together or not at all: the first takes permits for all, and the others claim
theirs. Sequences that another replica has already admitted bypass the limits, so that they finish;
but if that replica still runs them, they are admitted only to a free slot.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.contract import GenerationRequest, RequestGroup
from deployments.errors import InvalidRequestError, OverloadedError
from deployments.retry_after import RetryEstimator


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on what is admitted.

    Attributes:
        num_slots: Sequences that run at once.
        max_queued_sequences: Sequences that may wait for a slot. This is the configuration's
            `max_queued_requests`: an HTTP request counts once for each of its sequences.
        max_queued_tokens: Tokens of the waiting sequences: their prompts and the tokens that they
            may generate. None means no limit on tokens.
    """

    num_slots: int
    max_queued_sequences: int
    max_queued_tokens: int | None

    @property
    def max_sequences(self) -> int:
        """The most sequences that are admitted at once, running and waiting."""
        return self.num_slots + self.max_queued_sequences


class Permit:
    """The right of one sequence to run or to wait."""

    def __init__(self, admission: "Admission", siblings: "tuple[Permit, ...]" = ()) -> None:
        """Create a permit for a single sequence, or for the first of a group.

        Args:
            admission: The admission that counts the permit.
            siblings: The permits of the group's other sequences, until these claim them.
        """
        self.num_tokens = 0
        self.siblings = siblings
        self.unclaimed = list(siblings)
        self.is_bounded = True
        self.is_resumed = False
        self._admission = admission
        self._slot_is_due: asyncio.Event | None = None

    def weigh(self, num_tokens: int) -> None:
        """Count the sequence's tokens, and as many for each sibling permit.

        Raises:
            OverloadedError: Too many tokens would wait.
        """
        self._admission.weigh(self, num_tokens)

    async def wait_for_slot(self) -> None:
        """Wait until the sequence would have a KV slot if it were in the engine."""
        if not self._admission.is_running(self):
            self._slot_is_due = asyncio.Event()
            await self._slot_is_due.wait()

    def note_slot(self) -> None:
        """Wake `wait_for_slot`."""
        if self._slot_is_due is not None:
            self._slot_is_due.set()


class Admission:
    """The permits of one replica."""

    def __init__(
        self, limits: AdmissionLimits, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with no permits.

        Args:
            limits: The initial limits; `set_limits` replaces them, but permits already held stay
                valid.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self.limits = limits
        self.num_waiting_tokens = 0
        self._now_s = now_s
        self._running: set[Permit] = set()
        self._waiting: dict[Permit, None] = {}  # a set that keeps its order, as the engine's queue
        self._reserved: dict[str, Permit] = {}  # the first of each group
        self._retry_estimator = RetryEstimator()

    @property
    def num_running(self) -> int:
        """Permits of sequences that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Permits of sequences that wait for a slot."""
        return len(self._waiting)

    def is_running(self, permit: Permit) -> bool:
        """Return whether a permit's sequence has a slot."""
        return permit in self._running

    @property
    def is_full(self) -> bool:
        """Whether no further sequence would be admitted now."""
        return self.num_running + self.num_waiting >= self.limits.max_sequences

    def set_limits(self, max_queued_sequences: int, max_queued_tokens: int | None) -> None:
        """Replace the limits on waiting sequences."""
        self.limits = replace(
            self.limits,
            max_queued_sequences=max_queued_sequences,
            max_queued_tokens=max_queued_tokens,
        )

    @contextmanager
    def permit(self, request: GenerationRequest) -> Iterator[Permit]:
        """Hold a permit for a request's sequence while the block runs.

        Raises:
            OverloadedError: The limit of waiting sequences is reached.
            InvalidRequestError: The request's group is larger than can be admitted at once.
        """
        permit = self._take(request)
        try:
            yield permit
        finally:
            self._give_back(request, permit)

    def weigh(self, permit: Permit, num_tokens: int) -> None:
        """Count a permit's tokens; see `Permit.weigh`."""
        due = (permit, *permit.siblings)
        num_added = sum(num_tokens - p.num_tokens for p in due if p in self._waiting)
        if permit.is_bounded and num_added > 0:
            self._check_tokens(num_added)
        for each in due:
            each.num_tokens = num_tokens
        self.num_waiting_tokens += num_added

    def _take(self, request: GenerationRequest) -> Permit:
        group = _group_of(request)
        if group is not None and not group.is_first:
            return self._redeem(group.id)
        size = 1 if group is None else group.size
        is_bounded = not request.is_resumed
        if is_bounded:
            self._check(size)
        elif request.is_planned and self.num_running >= self.limits.num_slots:
            raise self._overloaded(1, "a sequence that is still run elsewhere asks for a free slot")
        siblings = tuple(Permit(self) for _ in range(size - 1))
        permit = Permit(self, siblings)
        permit.is_bounded = is_bounded
        permit.is_resumed = request.is_resumed
        for each in (permit, *siblings):
            self._enter(each)
        if group is not None:
            self._reserved[group.id] = permit
        return permit

    def _redeem(self, group_id: str) -> Permit:
        """Return a permit that the group's first sequence has reserved, or one beyond the limits.

        The first sequence may have run on another replica or may have ended already; this sequence
        still belongs to an admitted request.
        """
        first = self._reserved.get(group_id)
        permit = first.unclaimed.pop() if first and first.unclaimed else Permit(self)
        permit.is_bounded = False
        if permit not in self._running and permit not in self._waiting:
            self._enter(permit)
        return permit

    def _check(self, num_new: int) -> None:
        num_held = self.num_running + self.num_waiting
        max_sequences = self.limits.max_sequences
        if num_new > max_sequences:
            raise InvalidRequestError(
                f"The request asks for {num_new} texts at once, and the model admits "
                f"{max_sequences} at most; ask for fewer."
            )
        if num_held + num_new > max_sequences:
            raise self._overloaded(
                num_held + num_new - max_sequences,
                f"{self.num_running} sequences run and {self.num_waiting} wait "
                f"(max_queued_requests is {self.limits.max_queued_sequences})",
            )

    def _check_tokens(self, num_new: int) -> None:
        limit = self.limits.max_queued_tokens
        if limit is None or self.num_waiting_tokens + num_new <= limit:
            return
        raise self._overloaded(
            self._num_to_end(self.num_waiting_tokens + num_new - limit),
            f"{self.num_waiting_tokens} tokens wait (max_queued_tokens is {limit})",
        )

    def _overloaded(self, num_to_end: int, why: str) -> OverloadedError:
        return self._retry_estimator.overloaded(num_to_end, why, self._now_s())

    def _num_to_end(self, num_tokens: int) -> int:
        """Return how many sequences must end before `num_tokens` fewer tokens wait.

        Each end lets the first waiting sequence run.
        """
        for number, permit in enumerate(self._waiting, start=1):
            num_tokens -= permit.num_tokens
            if num_tokens <= 0:
                return number
        return max(1, len(self._waiting))

    def _enter(self, permit: Permit) -> None:
        if not self._running:
            self._retry_estimator.start(self._now_s())
        if len(self._running) < self.limits.num_slots:
            self._running.add(permit)
        elif permit.is_resumed:
            waiting = [*self._waiting]
            num_resumed = sum(each.is_resumed for each in waiting)
            waiting.insert(num_resumed, permit)
            self._waiting = dict.fromkeys(waiting)
        else:
            self._waiting[permit] = None

    def _give_back(self, request: GenerationRequest, permit: Permit) -> None:
        # A request whose replica seemed lost may come again before its first call has ended.
        group = request.group
        if group is not None and self._reserved.get(group.id) is permit:
            del self._reserved[group.id]
        for unclaimed in permit.unclaimed:
            self._leave(unclaimed)
        if permit.num_tokens:  # otherwise it was refused and took no engine time
            self._retry_estimator.note_end(self._now_s())
        self._leave(permit)

    def _leave(self, permit: Permit) -> None:
        if permit in self._waiting:
            del self._waiting[permit]
            self.num_waiting_tokens -= permit.num_tokens
            return
        self._running.remove(permit)
        if self._waiting and len(self._running) < self.limits.num_slots:
            first = next(iter(self._waiting))
            del self._waiting[first]
            self.num_waiting_tokens -= first.num_tokens
            self._running.add(first)
            first.note_slot()


def _group_of(request: GenerationRequest) -> RequestGroup | None:
    """Return the request's group, unless it has moved here from another replica."""
    return None if request.is_resumed else request.group
