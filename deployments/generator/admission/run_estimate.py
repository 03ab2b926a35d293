"""What the engine runs, estimated: which of a replica's sequences run, and how the others wait.

Sequences run while fewer than `max_num_seqs` do and their blocks of KV memory fit besides those of
the others, in each group. The rest wait in the order of their claims (`contract.claims`); with one
priority and one tenant, that is the order of the engine's own queue: resumed sequences first, then
the oldest. None overtakes: while the first does not fit, those behind it wait, too.

If the first does not fit, and its priority is better than that of some that run, these give up
their place and wait: the newest of the lowest priority first, as many as are needed, and none if
that would not suffice. How long each has waited counts here, too, so a sequence that was displaced
often is not displaced for ever. At the same priority, those of tenants that have more than their
share of what runs, in places or in memory, give up theirs to a tenant that runs nothing: by turns.

What a sequence needs is not known before it is weighed; until then it counts without blocks. One
that runs by then and turns out not to fit goes back among those that wait.

This is an estimate. Prefixes that the engine retains do not count, because they make room for any
sequence. A sequence whose length is not known in advance counts with what it has: it may outgrow
that later, and the engine then moves it or makes it wait.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deployments.contract.claims import PRIORITY_AGING_S, Claim, ClaimQueue, FairShares
from deployments.generator.admission.permit import Permit
from deployments.plan.kv_layout import KVLayout
from deployments.plan.replica_report import NO_WAITS, WaitReason, Waits

Key = TypeVar("Key")


class RunEstimate:
    """The permits of all sequences of a replica: they would run or wait."""

    def __init__(
        self,
        max_num_seqs: int,
        layout: KVLayout,
        aging_s: float = PRIORITY_AGING_S,
        now_s: Callable[[], float] = time.monotonic,
        shares: FairShares | None = None,
    ) -> None:
        """Start with no permits.

        Args:
            max_num_seqs: The most sequences that run at once.
            layout: The engine's KV memory.
            aging_s: Seconds of waiting that are worth one step of priority.
            now_s: Returns the time of a monotonic clock, in seconds.
            shares: What each tenant got here; None starts without tenants.
        """
        self.num_waiting_tokens = 0
        self.queue = ClaimQueue[Permit](aging_s, self._rank)
        self._max_num_seqs = max_num_seqs
        self._now_s = now_s
        self._shares = FairShares() if shares is None else shares
        self._num_blocks = layout.num_blocks
        self._num_free = list(layout.num_blocks)
        self._num_arrivals = 0
        self._running: dict[Permit, None] = {}
        self._num_of_priority: Counter[int] = Counter()  # of those that run
        self._num_of_tenant: Counter[str] = Counter()  # of those that run
        self._num_of_kind: Counter[tuple[int, str]] = Counter()  # of all
        self._num_displaced = 0  # of those that wait
        self._changed: dict[Permit, None] = {}

    @property
    def num_running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self.queue)

    @property
    def is_of_one_kind(self) -> bool:
        """Whether all that run or wait have one priority and one tenant."""
        return len(self._num_of_kind) <= 1

    @property
    def waiting(self) -> Iterator[Permit]:
        """Those that wait, in order."""
        return iter(self.queue)

    @property
    def waits(self) -> Waits:
        """Why and how long sequences wait, and how far their tenants' services are apart."""
        if not len(self.queue):
            return NO_WAITS
        has_place = self.num_running < self._max_num_seqs
        reason = WaitReason.MEMORY if has_place else WaitReason.TURN
        num_displaced = self._num_displaced
        num_of = {WaitReason.DISPLACED: num_displaced, reason: self.num_waiting - num_displaced}
        return Waits(
            {each: num for each, num in num_of.items() if num},
            self._now_s() - self.queue.oldest_s,
            self._shares.gap,
        )

    @property
    def held(self) -> list[Permit]:
        """Those that run or wait."""
        return [*self._running, *self.queue.unordered]

    @property
    def oldest_first(self) -> list[Permit]:
        """Those that wait, by their arrival."""
        return sorted(self.queue.unordered, key=lambda each: each.arrival)

    def holds(self, permit: Permit) -> bool:
        """Return whether a permit's sequence runs or waits."""
        return permit.is_running or permit in self.queue

    def gathers_memory(self, permit: Permit) -> bool:
        """Return whether an offered sequence waits for memory alone, and comes next.

        None overtakes it, so what comes free is kept for it. If it left, smaller ones would take
        that before it came again, for ever.
        """
        has_place = self.num_running < self._max_num_seqs
        return permit.is_offered and has_place and self.queue.first is permit

    def take_changed(self) -> list[Permit]:
        """Return the permits that have begun to run or to wait since the last call."""
        changed, self._changed = list(self._changed), {}
        return changed

    def num_to_wait(
        self, num_new: int, claim: Claim | None = None, *, is_resumed: bool = False
    ) -> int:
        """Return how many of `num_new` sequences, not weighed yet, would have to wait."""
        if len(self.queue):
            new = self._coming(claim, is_resumed=is_resumed)
            if self._first_with(new) is not new:
                return num_new
        return max(0, self.num_running + num_new - self._max_num_seqs)

    def behind(self, claim: Claim) -> list[Permit]:
        """Return those of a worse priority that wait and may leave, the first to go first.

        That is the newest of the worst priority.
        """
        behind = [
            each
            for each in self.queue.unordered
            if each.claim.priority > claim.priority and each.may_make_room
        ]
        return sorted(behind, key=lambda each: (each.claim.priority, each.arrival), reverse=True)

    def num_displaceable(self, claim: Claim) -> int:
        """Return how many that run would give up their places to a claim, and could be parked."""
        if max(self._num_of_priority, default=0) <= claim.priority:
            return 0
        now_s = self._now_s()
        new = self._coming(claim)
        return sum(
            each.yields_to(new, self.queue.aging_s, now_s)
            and each.run is not None
            and each.run.is_parkable
            for each in self._running
        )

    def takes_place(self, claim: Claim, due: Sequence[Permit] = ()) -> bool:
        """Return whether a tenant that runs nothing gets a place of one beyond its share.

        One that runs is parked for it then, or will be once it is accepted.

        Args:
            claim: The tenant's.
            due: Its permits, if it has some already; none of it that waits may be before these.
        """
        new = self._coming(claim)
        first = self._first_with(new)
        beyond = self._beyond_share(new) if first is new or first in due else []
        return any(
            each.is_parkable if each.run is None else each.run.is_parkable for each in beyond
        )

    def _first_with(self, new: Permit) -> Permit | None:
        """Return what would be next if one more waited."""
        self.queue.add(new)
        first = self.queue.first
        self.queue.remove(new)
        return first

    def _coming(self, claim: Claim | None, *, is_resumed: bool = False) -> Permit:
        new = Permit(claim=claim, is_resumed=is_resumed)
        new.note_arrival(self._num_arrivals, self._now_s())
        return new

    def enter(self, permit: Permit) -> None:
        """Let a new sequence run, or wait."""
        permit.note_arrival(self._num_arrivals, self._now_s())
        self._num_arrivals += 1
        self._queue(permit)
        self._let_run()

    def leave(self, permit: Permit) -> None:
        """Drop a sequence that has ended; those that can run now do."""
        if permit in self.queue:
            self._unqueue(permit)
        else:
            assert permit.is_running, "a permit leaves once, after it has entered"
            self._stop(permit)
        self._changed.pop(permit, None)
        self._let_run()

    def settle(self) -> None:
        """Let those that wait run or take a place, after one of them was accepted."""
        self._let_run()

    def num_beyond(self, permits: Sequence[Permit], blocks: tuple[int, ...]) -> int:
        """Return how many of these that run would have to wait if each needed `blocks`."""
        running = [permit for permit in permits if permit.is_running]
        num_free = list(self._num_free)
        for permit in running:
            for group, num_blocks in enumerate(permit.blocks):
                num_free[group] += num_blocks
        num_that_fit = min(free // num for free, num in zip(num_free, blocks, strict=True))
        return max(0, len(running) - num_that_fit)

    def weigh(self, permits: Sequence[Permit], num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Set what each of these needs; the last that no longer fit have to wait.

        Args:
            permits: Permits that this holds, in order.
            num_tokens: The most tokens that each can reach.
            blocks: The blocks of each group that each needs.
        """
        running = [permit for permit in permits if permit.is_running]
        num_kept = len(running) - self.num_beyond(permits, blocks)
        for permit in running:
            self._stop(permit)
        for permit in permits:
            if permit in self.queue:
                self.num_waiting_tokens += num_tokens - permit.num_tokens
            permit.num_tokens, permit.blocks = num_tokens, blocks
        for permit in running[:num_kept]:
            self._run(permit)
        for permit in running[num_kept:]:
            self._queue(permit)
        self._let_run()

    def _rank(self, tenant: str) -> tuple[float, int]:
        """Sort tenants: one that runs less is before others whose counter is the same."""
        return self._shares.counter(tenant), self._num_of_tenant[tenant]

    def _let_run(self) -> None:
        """Let those that wait run, in order, until one does not fit and may take no place."""
        while (first := self.queue.first) is not None:
            if not self._fits(first, self._num_free, self.num_running) and not self._displace(
                first
            ):
                return
            self._unqueue(first)
            self._run(first)

    def _fits(self, permit: Permit, num_free: Sequence[int], num_running: int) -> bool:
        return num_running < self._max_num_seqs and all(
            num <= free for num, free in zip(permit.blocks, num_free, strict=False)
        )

    def _displace(self, first: Permit) -> bool:
        """Let others wait, if then the first of those that wait fits.

        Those of lower priority do. Otherwise, if the first one's tenant runs nothing, those of
        others do that have more than their share of what runs: else a tenant with one short request
        would wait for the end of a long one.
        """
        if first.run is None:
            return False
        now_s = self._now_s()
        if max(self._num_of_priority, default=0) > first.claim.priority:
            yielding = [p for p in self._running if p.yields_to(first, self.queue.aging_s, now_s)]
            yielding.sort(key=lambda each: (each.claim.priority, each.arrival), reverse=True)
            if self._take_places(first, yielding, now_s):
                return True
        return self._take_places(first, self._beyond_share(first), now_s)

    def _beyond_share(self, first: Permit) -> list[Permit]:
        """Return what yields to a tenant that runs nothing; see `FairShares.to_go`.

        What runs is divided, in what the first lacks: places, or blocks of a group. Of a tenant,
        those yield that were displaced least often, so that none pays for all; then the newest.
        Those that are not accepted yet will yield only to one that is not, either.
        """
        of_tenant = self._num_of_tenant
        if first.claim.tenant in of_tenant or max(of_tenant.values(), default=0) <= 1:
            return []
        num_missing, group = self._lacks(first)
        running = [
            (each, each.claim, 1 if group is None else _num_blocks(each, group))
            for each in sorted(self._running, key=lambda each: (-each.num_displaced, each.arrival))
        ]
        return self._shares.to_go(
            first.claim,
            num_missing,
            sum(size for _, _, size in running),
            running,
            lambda each: (
                (first.run is None if each.run is None else each.run.may_yield)
                and each.claim.priority == first.claim.priority
            ),
        )

    def _lacks(self, permit: Permit) -> tuple[int, int | None]:
        """Return how many blocks one that does not fit lacks, and of which group.

        Of several groups it is the scarcest; without a group, it lacks a place.
        """
        total = self._num_blocks
        lacking = [
            (num - free, group)
            for group, (num, free) in enumerate(zip(permit.blocks, self._num_free, strict=False))
            if num > free
        ]
        return max(lacking, key=lambda each: each[0] / total[each[1]], default=(1, None))

    def _take_places(self, first: Permit, yielding: Sequence[Permit], now_s: float) -> bool:
        """Let as many of these wait, in order, as the first needs; none if that doesn't suffice."""
        num_free, num_running = list(self._num_free), self.num_running
        for number, permit in enumerate(yielding, start=1):
            num_running -= 1
            for group, num_blocks in enumerate(permit.blocks):
                num_free[group] += num_blocks
            if self._fits(first, num_free, num_running):
                for displaced in yielding[:number]:
                    self._stop(displaced)
                    displaced.note_displaced(now_s)
                    self._queue(displaced)
                return True
        return False

    def _run(self, permit: Permit) -> None:
        self._running[permit] = None
        self._num_of_priority[permit.claim.priority] += 1
        self._num_of_tenant[permit.claim.tenant] += 1
        self._num_of_kind[permit.claim.queue] += 1
        self._changed[permit] = None
        permit.note_running(self._now_s())
        for group, num_blocks in enumerate(permit.blocks):
            self._num_free[group] -= num_blocks

    def _stop(self, permit: Permit) -> None:
        del self._running[permit]
        _count_down(self._num_of_priority, permit.claim.priority)
        _count_down(self._num_of_tenant, permit.claim.tenant)
        _count_down(self._num_of_kind, permit.claim.queue)
        self._changed[permit] = None
        permit.note_waiting()
        for group, num_blocks in enumerate(permit.blocks):
            self._num_free[group] += num_blocks

    def _queue(self, permit: Permit) -> None:
        self.queue.add(permit)
        self._num_displaced += bool(permit.num_displaced)
        self._num_of_kind[permit.claim.queue] += 1
        self._shares.enter(permit.claim)
        self.num_waiting_tokens += permit.num_tokens

    def _unqueue(self, permit: Permit) -> None:
        self.queue.remove(permit)
        self._num_displaced -= bool(permit.num_displaced)
        _count_down(self._num_of_kind, permit.claim.queue)
        self._shares.leave(permit.claim)
        self.num_waiting_tokens -= permit.num_tokens


def _num_blocks(permit: Permit, group: int) -> int:
    return permit.blocks[group] if permit.blocks else 0  # none until it is weighed


def _count_down(counter: Counter[Key], key: Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
