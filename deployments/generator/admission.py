"""Who may run on a replica, and who may wait for it.

Each sequence holds a permit from its arrival to its end. As many run as there are KV slots; behind
them a bounded number waits, counted in requests and in tokens, oldest first as in the engine's own
line. All ingress replicas meet here, so their number changes nothing. The arithmetic belongs to the
replica's event loop and needs no lock.

A request is counted before anything is done for it, so that a refusal costs next to nothing; its
tokens are counted once they are known. The sequences of one request (several answers, several
prompts) are admitted whole or not at all: the first takes permits for all, and the others find
theirs. What was admitted elsewhere before passes ahead of the limits: it shall finish.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.contract import GenerationRequest, RequestGroup
from deployments.drain_rate import DrainRate
from deployments.errors import InvalidRequestError, OverloadedError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much is admitted.

    Attributes:
        num_slots: Sequences that run at once.
        max_queued_requests: Sequences that may wait behind them.
        max_queued_tokens: Tokens of those that wait: of their prompts, and what they may generate.
            None counts the requests alone.
    """

    num_slots: int
    max_queued_requests: int
    max_queued_tokens: int | None

    @property
    def max_requests(self) -> int:
        """Sequences that are admitted at once."""
        return self.num_slots + self.max_queued_requests


class Permit:
    """The right of one sequence to run, or to wait for its turn."""

    def __init__(self, admission: "Admission", siblings: "tuple[Permit, ...]" = ()) -> None:
        """Belong to an admission, for one sequence or for the first of several.

        Args:
            admission: Where it counts.
            siblings: The permits of the request's other sequences, until they come for them.
        """
        self.num_tokens = 0
        self.siblings = siblings
        self.is_bounded = True
        self._admission = admission

    def weigh(self, num_tokens: int) -> None:
        """Count the sequence's tokens; its siblings, as far as they are still to come, count alike.

        Raises:
            OverloadedError: Too many tokens would wait.
        """
        self._admission.weigh(self, num_tokens)


class Admission:
    """The permits of one replica."""

    def __init__(
        self, limits: AdmissionLimits, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Admit nobody yet.

        Args:
            limits: May be replaced at any time; nobody who was admitted loses the permit.
            now_s: The time, in seconds that never run backwards.
        """
        self.limits = limits
        self.num_waiting_tokens = 0
        self._now_s = now_s
        self._running: set[Permit] = set()
        self._waiting: dict[Permit, None] = {}  # a set that keeps its order, oldest first
        self._reserved: dict[str, list[Permit]] = {}
        self._drain_rate = DrainRate()

    @property
    def num_running(self) -> int:
        """Permits that a slot is meant for."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Permits behind them."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether not even one sequence would be admitted now."""
        return self.num_running + self.num_waiting >= self.limits.max_requests

    def set_limits(self, max_queued_requests: int, max_queued_tokens: int | None) -> None:
        """Replace the limits of those who wait."""
        self.limits = replace(
            self.limits,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
        )

    @contextmanager
    def permit(self, request: GenerationRequest) -> Iterator[Permit]:
        """Hold a permit for a request; however the body ends, it is given back once.

        Raises:
            OverloadedError: As many wait as may.
            InvalidRequestError: Its group is larger than all that is ever admitted at once.
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
        is_bounded = not request.generated_token_ids
        if is_bounded:
            self._check(size)
        siblings = tuple(Permit(self) for _ in range(size - 1))
        permit = Permit(self, siblings)
        permit.is_bounded = is_bounded
        for each in (permit, *siblings):
            self._enter(each)
        if group is not None:
            self._reserved[group.id] = list(siblings)
        return permit

    def _redeem(self, group_id: str) -> Permit:
        """Return a permit that the first of the group has taken, or one beyond the limits.

        The first may have been admitted by another replica, or may have ended already; this
        sequence belongs to an admitted request all the same.
        """
        reserved = self._reserved.get(group_id)
        permit = reserved.pop() if reserved else Permit(self)
        permit.is_bounded = False
        if permit not in self._running and permit not in self._waiting:
            self._enter(permit)
        return permit

    def _check(self, num_new: int) -> None:
        num_held = self.num_running + self.num_waiting
        max_requests = self.limits.max_requests
        if num_new > max_requests:
            raise InvalidRequestError(
                f"The request asks for {num_new} texts at once, and the model admits "
                f"{max_requests} at most; ask for fewer."
            )
        if num_held + num_new > max_requests:
            raise self._overloaded(
                num_held + num_new - max_requests,
                f"{self.num_running} requests run and {self.num_waiting} wait "
                f"(max_queued_requests is {self.limits.max_queued_requests})",
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
        return self._drain_rate.overloaded(num_to_end, why, self._now_s())

    def _num_to_end(self, num_tokens: int) -> int:
        """Return how many must end until so many tokens less wait: each lets the oldest run."""
        for number, permit in enumerate(self._waiting, start=1):
            num_tokens -= permit.num_tokens
            if num_tokens <= 0:
                return number
        return max(1, len(self._waiting))

    def _enter(self, permit: Permit) -> None:
        if not self._running:
            self._drain_rate.start(self._now_s())
        if len(self._running) < self.limits.num_slots:
            self._running.add(permit)
        else:
            self._waiting[permit] = None

    def _give_back(self, request: GenerationRequest, permit: Permit) -> None:
        group = _group_of(request)
        if group is not None and group.is_first:
            for unclaimed in self._reserved.pop(group.id, ()):
                self._leave(unclaimed)
        if permit.num_tokens:  # else it was refused, and never held anybody up
            self._drain_rate.note_end(self._now_s())
        self._leave(permit)

    def _leave(self, permit: Permit) -> None:
        if permit in self._waiting:
            del self._waiting[permit]
            self.num_waiting_tokens -= permit.num_tokens
            return
        self._running.remove(permit)
        if self._waiting and len(self._running) < self.limits.num_slots:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self.num_waiting_tokens -= oldest.num_tokens
            self._running.add(oldest)


def _group_of(request: GenerationRequest) -> RequestGroup | None:
    """Return what the request was admitted with, unless it has come alone from another replica."""
    return None if request.generated_token_ids else request.group
