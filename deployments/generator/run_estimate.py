"""What the engine runs, estimated: which of a replica's sequences run, and how the others wait.

Sequences run while fewer than `max_num_seqs` do and their blocks of KV memory fit besides those of
the others, in each group. The rest wait in the order of the engine's own queue: resumed sequences
first, then the oldest. None overtakes: while the first does not fit, those behind it wait, too.

What a sequence needs is not known before it is weighed; until then it counts without blocks. One
that runs by then and turns out not to fit goes back among those that wait.

This is an estimate. Prefixes that the engine retains do not count, because they make room for any
sequence. A sequence whose length is not known in advance counts with what it has: it may outgrow
that later, and the engine then moves it or makes it wait.
"""

import asyncio
from collections.abc import Iterator, Sequence

from deployments.plan.kv_layout import KVLayout


class Permit:
    """The right of one sequence to run or to wait.

    Attributes:
        num_tokens: The most tokens that it can reach; 0 until it is weighed.
        blocks: The blocks of each group that it needs; none until it is weighed.
        arrival: Its number among all that ever came; lower is older.
        siblings: The permits of its group's other sequences, if it is the first of a group.
        unclaimed: Those of them that no sequence has claimed yet.
        is_resumed: Whether another replica had accepted it.
        is_planned: Whether that replica still runs it.
        is_bounded: Whether the limits on what waits apply to it.
    """

    def __init__(
        self,
        siblings: "tuple[Permit, ...]" = (),
        *,
        is_resumed: bool = False,
        is_planned: bool = False,
    ) -> None:
        """Start without a known size."""
        self.num_tokens = 0
        self.blocks: tuple[int, ...] = ()
        self.arrival = 0
        self.siblings = siblings
        self.unclaimed = list(siblings)
        self.is_resumed = is_resumed
        self.is_planned = is_planned
        self.is_bounded = not is_resumed
        self._runs = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether the sequence would run if it were in the engine."""
        return self._runs.is_set()

    async def wait_for_turn(self) -> None:
        """Wait until the sequence would run if it were in the engine."""
        await self._runs.wait()

    def note_running(self, *, is_running: bool) -> None:
        """Note whether the sequence would run, and wake `wait_for_turn` if so."""
        if is_running:
            self._runs.set()
        else:
            self._runs.clear()


class RunEstimate:
    """The permits of all sequences of a replica: they would run or wait."""

    def __init__(self, max_num_seqs: int, layout: KVLayout) -> None:
        """Start with no permits.

        Args:
            max_num_seqs: The most sequences that run at once.
            layout: The engine's KV memory.
        """
        self.num_waiting_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._num_free = list(layout.num_blocks)
        self._num_arrivals = 0
        self._num_running = 0
        self._waiting: dict[Permit, None] = {}  # in order

    @property
    def num_running(self) -> int:
        """How many run."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def waiting(self) -> Iterator[Permit]:
        """Those that wait, in order."""
        return iter(self._waiting)

    def holds(self, permit: Permit) -> bool:
        """Return whether a permit's sequence runs or waits."""
        return permit.is_running or permit in self._waiting

    def num_to_wait(self, num_new: int, *, is_resumed: bool = False) -> int:
        """Return how many of `num_new` sequences, not weighed yet, would have to wait."""
        first = next(iter(self._waiting), None)
        if first is not None and (first.is_resumed or not is_resumed):
            return num_new
        return max(0, self._num_running + num_new - self._max_num_seqs)

    def enter(self, permit: Permit) -> None:
        """Let a new sequence run, or wait."""
        permit.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._queue(permit)
        self._let_run()

    def leave(self, permit: Permit) -> None:
        """Drop a sequence that has ended; those that can run now do."""
        if permit in self._waiting:
            self._unqueue(permit)
        else:
            assert permit.is_running, "a permit leaves once, after it has entered"
            self._stop(permit)
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
            if permit in self._waiting:
                self.num_waiting_tokens += num_tokens - permit.num_tokens
            permit.num_tokens, permit.blocks = num_tokens, blocks
        for permit in running[:num_kept]:
            self._run(permit)
        for permit in running[num_kept:]:
            self._queue(permit)
        self._let_run()

    def _let_run(self) -> None:
        """Let those that wait run, in order, until one does not fit."""
        while self._waiting and self._num_running < self._max_num_seqs:
            first = next(iter(self._waiting))
            if any(num > free for num, free in zip(first.blocks, self._num_free, strict=False)):
                return
            self._unqueue(first)
            self._run(first)

    def _run(self, permit: Permit) -> None:
        self._num_running += 1
        permit.note_running(is_running=True)
        for group, num_blocks in enumerate(permit.blocks):
            self._num_free[group] -= num_blocks

    def _stop(self, permit: Permit) -> None:
        self._num_running -= 1
        permit.note_running(is_running=False)
        for group, num_blocks in enumerate(permit.blocks):
            self._num_free[group] += num_blocks

    def _queue(self, permit: Permit) -> None:
        last = next(reversed(self._waiting), permit)
        self._waiting[permit] = None
        self.num_waiting_tokens += permit.num_tokens
        if _order(permit) < _order(last):
            self._waiting = dict.fromkeys(sorted(self._waiting, key=_order))

    def _unqueue(self, permit: Permit) -> None:
        del self._waiting[permit]
        self.num_waiting_tokens -= permit.num_tokens


def _order(permit: Permit) -> tuple[bool, int]:
    """Sort resumed sequences first, then older ones."""
    return not permit.is_resumed, permit.arrival
