"""Admission: which sequences may run on a replica, which may wait, and which are refused.

Each sequence holds a permit from its arrival to its end. At most `max_num_seqs` run, if their
tokens fit into the KV memory; `run_estimate` says which. A limited number of sequences and tokens
may wait, in the order of their claims; `engine_feed` lets them into the engine. All ingress
replicas share this admission, so their number does not change the limits. It runs only on the
replica's event loop and needs no lock.

A sequence is counted before any work is done for it, so that a refusal costs almost nothing. Its
tokens are counted once they are known; if it turns out then that it has to wait, because the memory
is full, and as many wait as may, it is refused then. The sequences of one HTTP request (several
answers, several prompts) are admitted together or not at all: the first takes permits for all, and
the others take theirs. Sequences that another replica has already admitted bypass the limits, so
that they finish; but if that replica still runs them, they are admitted only if they can run at
once.

If as many wait as may, a request of a better priority than others is admitted all the same. One of
those that wait is then parked, or refused if it is not accepted yet: the newest of the worst
priority. If none waits that could be, one that runs is going to give up its place. At the same
priority, a tenant that uses less than its share of the queue gets the room of the newest of the
tenant that is furthest beyond its own, or the place of one that runs if it runs nothing itself.
Nothing is parked before the request is known to be valid, and its tokens to find room, too: until
then, and until those that were displaced are parked, more may wait than the limit says, by as many
as can be parked.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter

from deployments.contract.claims import PRIORITY_AGING_S, Claim, FairShares, TenantService
from deployments.contract.errors import InvalidRequestError, OverloadedError, OverloadReason
from deployments.contract.generation import GenerationRequest, RequestGroup
from deployments.generator.admission.engine_feed import EngineFeed
from deployments.generator.admission.permit import Permit, Run
from deployments.generator.admission.run_estimate import RunEstimate
from deployments.plan.kv_layout import KVLayout
from deployments.plan.replica_report import Waits
from deployments.replica.retry_after import RetryEstimator

HANDED_OVER = "a sequence that still runs elsewhere would have to wait here"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on what is admitted.

    Attributes:
        max_num_seqs: The most sequences that run at once, if their tokens fit into the KV memory.
        max_queued_sequences: Sequences that may wait for their turn. This is the configuration's
            `max_queued_requests`: an HTTP request counts once for each of its sequences.
        max_queued_tokens: Tokens of the waiting sequences: their prompts and the tokens that they
            may generate. None means no limit on tokens.
    """

    max_num_seqs: int
    max_queued_sequences: int
    max_queued_tokens: int | None

    @property
    def max_sequences(self) -> int:
        """The most sequences that are admitted at once, running and waiting."""
        return self.max_num_seqs + self.max_queued_sequences


class Admission:
    """The permits of one replica."""

    def __init__(
        self,
        limits: AdmissionLimits,
        layout: KVLayout,
        now_s: Callable[[], float] = time.monotonic,
        *,
        priority_aging_s: float = PRIORITY_AGING_S,
    ) -> None:
        """Start with no permits.

        Args:
            limits: The initial limits; `set_limits` replaces them, but permits already held stay
                valid.
            layout: The engine's KV memory.
            now_s: Returns the time of a monotonic clock, in seconds.
            priority_aging_s: Seconds of waiting that are worth one step of priority.
        """
        self.limits = limits
        self._layout = layout
        self._now_s = now_s
        self._shares = FairShares()
        self._estimate = RunEstimate(
            limits.max_num_seqs, layout, priority_aging_s, now_s, self._shares
        )
        self._feed = EngineFeed(self._estimate)
        self._reserved: dict[str, Permit] = {}  # the first of each group
        self._retry_estimator = RetryEstimator()

    @property
    def num_running(self) -> int:
        """Permits of sequences that run."""
        return self._estimate.num_running

    @property
    def num_waiting(self) -> int:
        """Permits of sequences that wait."""
        return self._estimate.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return self._estimate.num_waiting_tokens

    @property
    def waits(self) -> Waits:
        """Why and how long sequences wait."""
        return self._estimate.waits

    def of_tenants(self, max_tenants: int) -> tuple[TenantService, ...]:
        """Return what tenants got; see `FairShares`."""
        return self._shares.of_tenants(max_tenants)

    @property
    def num_outside(self) -> int:
        """Accepted sequences that the engine does not have yet."""
        return self._feed.num_outside

    @property
    def num_refused(self) -> int:
        """Requests that were refused lately; see `RetryEstimator.num_refused`."""
        return self._retry_estimator.num_refused(self._now_s())

    @property
    def is_full(self) -> bool:
        """Whether no further sequence would be admitted now."""
        return self._num_too_many(self._estimate.num_to_wait(1)) > 0

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

    @contextmanager
    def turns(self, permit: Permit, run: Run) -> Iterator[None]:
        """Let a weighed sequence into the engine in its turns, and out, while the block runs.

        Args:
            permit: The sequence's.
            run: The sequence.
        """
        self._feed.add(permit, run)
        try:
            yield
        finally:
            self._feed.drop(permit)

    def note_begun(self, permit: Permit) -> None:
        """Note that the engine has begun with a sequence."""
        self._feed.note_begun(permit)

    def charge(self, permit: Permit, served: float) -> None:
        """Count what a sequence costs its tenant; see `FairShares.charge`."""
        self._shares.charge(permit.claim, served)

    def park(self, permit: Permit) -> None:
        """Give a sequence that waits back to its ingress; its room is free at once."""
        self._park([permit])

    def park_all(self) -> None:
        """Give all accepted sequences that may be parked back to their ingresses.

        Also those that the engine has begun with: they go on later, with what has gone out.
        """
        self._park([each for each in self._accepted if _run_of(each).is_parkable])

    def abort_all(self) -> None:
        """End all accepted sequences, which may go on elsewhere."""
        self._end_runs(self._accepted, lambda run: run.abort())

    def _park(self, permits: list[Permit]) -> None:
        self._end_runs(permits, lambda run: run.park())

    @property
    def _accepted(self) -> list[Permit]:
        return [each for each in self._estimate.held if each.run is not None]

    def _end_runs(self, permits: list[Permit], end: Callable[[Run], object]) -> None:
        """End sequences; none of them, and none that waits, gets into the engine meanwhile."""
        for permit in permits:
            end(_run_of(permit))
            self._feed.drop(permit)
        for permit in permits:
            self._estimate.leave(permit)
        self._feed.update()

    def park_late(self, permit: Permit) -> None:
        """Park a sequence that has waited too long, unless memory is coming free for it."""
        if not self._estimate.gathers_memory(permit):
            self.park(permit)

    def weigh(self, permit: Permit, num_tokens: int, num_planned_tokens: int) -> None:
        """Count a sequence's tokens, and as many for each sibling that is not weighed yet.

        Args:
            permit: The sequence's.
            num_tokens: The most that the sequence can reach, its prompt included.
            num_planned_tokens: As many as the engine reserves memory for when the sequence begins.

        Raises:
            OverloadedError: Too many sequences or tokens would wait, or it has made room meanwhile.
        """
        if permit.has_made_room:
            raise self._too_many_wait(1, f"{self.num_running} sequences run")
        permit.may_be_refused = False
        unweighed = [each for each in permit.siblings if not each.blocks]
        due = [each for each in (permit, *unweighed) if self._estimate.holds(each)]
        blocks = self._layout.blocks_for(num_planned_tokens)
        num_beyond = self._estimate.num_beyond(due, blocks)
        if num_beyond and permit.is_planned:
            raise self._no_room_for_hand_over()
        if permit.is_bounded:
            for each in self._to_park(permit, due, num_beyond, num_tokens):
                self._let_go(each)
        self._estimate.weigh(due, num_tokens, blocks)
        self._feed.update()

    def _take(self, request: GenerationRequest) -> Permit:
        group = _group_of(request)
        if group is not None and not group.is_first:
            return self._redeem(group.id, request.claim)
        size = 1 if group is None else group.size
        claim = request.claim
        num_owed = 0
        if not request.is_resumed:
            num_owed = self._check(size, claim)
        elif request.is_planned and self._estimate.num_to_wait(1, claim, is_resumed=True):
            raise self._no_room_for_hand_over()
        siblings = tuple(Permit(claim=claim) for _ in range(size - 1))
        permit = Permit(
            siblings, claim=claim, is_resumed=request.is_resumed, is_planned=request.is_planned
        )
        permit.num_owed = num_owed
        permit.is_offered = request.is_parked
        permit.may_be_refused = request.is_parkable and group is None and not request.is_resumed
        for each in (permit, *siblings):
            each.is_parkable = request.is_parkable
            self._enter(each)
        if group is not None:
            self._reserved[group.id] = permit
        return permit

    def _redeem(self, group_id: str, claim: Claim) -> Permit:
        """Return a permit that the group's first sequence has reserved, or one beyond the limits.

        The first sequence may have run on another replica or may have ended already; this sequence
        still belongs to an admitted request.
        """
        first = self._reserved.get(group_id)
        permit = first.unclaimed.pop() if first and first.unclaimed else Permit(claim=claim)
        permit.is_bounded = False
        if not self._estimate.holds(permit):
            self._enter(permit)
        return permit

    def _check(self, num_new: int, claim: Claim) -> int:
        """Return how many must be parked for new sequences, once they are known to be valid."""
        max_sequences = self.limits.max_sequences
        if num_new > max_sequences:
            raise InvalidRequestError(
                f"The request asks for {num_new} texts at once, and the model admits "
                f"{max_sequences} at most; ask for fewer."
            )
        num_to_wait = self._estimate.num_to_wait(num_new, claim)
        num_too_many = self._num_too_many(num_to_wait)
        if num_too_many and self._to_leave(num_too_many, claim) is None:
            raise self._too_many_wait(num_too_many, f"{self.num_running} sequences run")
        return min(num_to_wait, num_too_many)

    def _num_too_many(self, num_new: int) -> int:
        """Return by how many sequences the limit is exceeded if `num_new` more have to wait."""
        if num_new == 0:
            return 0
        return max(0, self.num_waiting + num_new - self.limits.max_queued_sequences)

    def _to_park(
        self, permit: Permit, due: Sequence[Permit], num_beyond: int, num_tokens: int
    ) -> list[Permit]:
        """Return what to park, so that the queue has room for a sequence and its siblings.

        Args:
            permit: The sequence's.
            due: It and those of its siblings that are weighed with it.
            num_beyond: How many of these turn out to have to wait.
            num_tokens: The most that each can reach.

        Raises:
            OverloadedError: Too many sequences or tokens would wait; nothing is to be parked.
        """
        num_too_many = max(0, self.num_waiting + num_beyond - self.limits.max_queued_sequences)
        num_missing = min(permit.num_owed + num_beyond, num_too_many)
        leaving = self._to_leave(num_missing, permit.claim, due) if num_missing else []
        if leaving is None:
            why = "those that run leave too little memory for this one"
            raise self._too_many_wait(num_too_many, why)
        waiting = [each.num_tokens for each in due if not each.is_running]
        num_new = num_tokens * (len(waiting) + num_beyond) - sum(waiting)
        limit = self.limits.max_queued_tokens
        if num_new <= 0 or limit is None:
            return leaving
        num_waiting_tokens = self.num_waiting_tokens - sum(each.num_tokens for each in leaving)
        num_missing = num_waiting_tokens + num_new - limit
        if num_missing <= 0:
            return leaving
        left_out = {*due, *leaving}
        rest = [each for each in self._estimate.oldest_first if each not in left_out]
        sizes = {each: each.num_tokens for each in rest}
        room = self._room(permit.claim, num_missing, limit, sizes)
        if not room:
            raise self._overloaded(
                self._num_to_end(num_missing),
                f"{self.num_waiting_tokens} tokens wait (max_queued_tokens is {limit})",
                OverloadReason.TOKENS,
            )
        return leaving + room

    def _to_leave(self, num: int, claim: Claim, due: Sequence[Permit] = ()) -> list[Permit] | None:
        """Return what is to go, so that `num` more may wait; None if there is no room for so many.

        Those that wait and are of a worse priority go first. Those that run and will be displaced
        count, too: they are parked when that is due. If these do not suffice, see `_room`.
        """
        behind = self._estimate.behind(claim)
        if len(behind) + self._estimate.num_displaceable(claim) >= num:
            return behind[:num]
        rest = [each for each in self._estimate.oldest_first if each not in due]
        limit = self.limits.max_queued_sequences
        if room := self._room(claim, num, limit, dict.fromkeys(rest, 1)):
            return room
        return [] if num == 1 and self._estimate.takes_place(claim, due) else None

    def _let_go(self, permit: Permit) -> None:
        """Let one that waits make room: it is parked, or refused if it is not accepted yet."""
        if permit.run is None:
            permit.has_made_room = True
            self._estimate.leave(permit)
        else:
            self.park(permit)

    def _room(
        self, claim: Claim, num_missing: int, limit: int, sizes: Mapping[Permit, int]
    ) -> list[Permit]:
        """Return the newest of tenants beyond their share of the queue, for one under its own.

        Args:
            claim: Of the request that asks for room.
            num_missing: How much room is missing.
            limit: How much the queue holds.
            sizes: How much each other that waits takes, oldest first.
        """
        waiting = [(permit, permit.claim, size) for permit, size in sizes.items()]
        may_go = attrgetter("may_make_room")
        return self._shares.to_go(claim, num_missing, limit, waiting, may_go)

    def _too_many_wait(self, num_too_many: int, why: str) -> OverloadedError:
        limit = self.limits.max_queued_sequences
        return self._overloaded(
            num_too_many, f"{why} and {self.num_waiting} wait (max_queued_requests is {limit})"
        )

    def _no_room_for_hand_over(self) -> OverloadedError:
        """Return the refusal of a sequence that runs elsewhere, which is no further load."""
        return self._retry_estimator.error(1, HANDED_OVER, self._now_s())

    def _overloaded(
        self, num_to_end: int, why: str, reason: OverloadReason = OverloadReason.REQUESTS
    ) -> OverloadedError:
        return self._retry_estimator.overloaded(num_to_end, why, self._now_s(), reason)

    def _num_to_end(self, num_tokens: int) -> int:
        """Return how many sequences must end before `num_tokens` fewer tokens wait.

        Each end lets the first waiting sequence run.
        """
        for number, permit in enumerate(self._estimate.waiting, start=1):
            num_tokens -= permit.num_tokens
            if num_tokens <= 0:
                return number
        return max(1, self.num_waiting)

    def _enter(self, permit: Permit) -> None:
        if not self.num_running:
            self._retry_estimator.start(self._now_s())
        self._estimate.enter(permit)
        self._feed.update()

    def _give_back(self, request: GenerationRequest, permit: Permit) -> None:
        # A request whose replica seemed lost may come again before its first call has ended.
        group = request.group
        if group is not None and self._reserved.get(group.id) is permit:
            del self._reserved[group.id]
        for unclaimed in permit.unclaimed:
            self._estimate.leave(unclaimed)
        if self._estimate.holds(permit):  # else it was parked, which ends nothing
            if permit.num_tokens:  # otherwise it was refused and took no engine time
                self._retry_estimator.note_end(self._now_s())
            self._estimate.leave(permit)
        self._feed.update()


def _run_of(permit: Permit) -> Run:
    assert permit.run is not None, "only accepted sequences run or are parked"
    return permit.run


def _group_of(request: GenerationRequest) -> RequestGroup | None:
    """Return the request's group, unless it has moved here from another replica."""
    return None if request.is_resumed else request.group
