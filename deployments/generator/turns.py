"""Turns: which of a replica's sequences run, and in which order the others wait.

Sequences run while fewer than `max_num_seqs` do and their blocks of KV memory fit besides those of
the others, in each group. The rest wait in the order of the engine's own queue: resumed sequences
first, then the oldest. None overtakes: while the first does not fit, those behind it wait, too.

What a sequence needs is not known before it is weighed; until then it counts without blocks. One
that runs by then and turns out not to fit goes to its place among those that wait.

This is an estimate of what the engine does. Prefixes that the engine retains do not count, because
they make room for any sequence. A sequence whose length is not known in advance counts with what it
has: it may outgrow that later, and the engine then moves it or makes it wait.
"""

import asyncio
from collections.abc import Iterator, Sequence

from deployments.plan.kv_layout import KVLayout


class Place:
    """The place of one sequence.

    Attributes:
        num_tokens: The most tokens that it can reach; 0 until it is weighed.
        is_resumed: Whether another replica had accepted it.
        arrival: Its number among all that ever came; lower is older.
        blocks: The blocks of each group that it needs; none until it is weighed.
    """

    def __init__(self, *, is_resumed: bool = False) -> None:
        """Make the place of a sequence that has not been weighed."""
        self.num_tokens = 0
        self.is_resumed = is_resumed
        self.arrival = 0
        self.blocks: tuple[int, ...] = ()
        self._turn_has_come: asyncio.Event | None = None

    @property
    def turn(self) -> tuple[bool, int]:
        """The order of places: resumed ones come first, then older ones."""
        return not self.is_resumed, self.arrival

    async def wait_until_noted(self) -> None:
        """Wait for the next `note_turn`."""
        self._turn_has_come = asyncio.Event()
        await self._turn_has_come.wait()

    def note_turn(self) -> None:
        """Wake `wait_until_noted`."""
        if self._turn_has_come is not None:
            self._turn_has_come.set()


class Turns:
    """The places of all sequences of a replica."""

    def __init__(self, max_num_seqs: int, layout: KVLayout) -> None:
        """Start with no places.

        Args:
            max_num_seqs: The most sequences that run at once.
            layout: The engine's KV memory.
        """
        self.num_waiting_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._num_free = list(layout.num_blocks)
        self._num_arrivals = 0
        self._running: set[Place] = set()
        self._waiting: dict[Place, None] = {}  # in order

    @property
    def num_running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def waiting(self) -> Iterator[Place]:
        """Those that wait, in order."""
        return iter(self._waiting)

    def is_running(self, place: Place) -> bool:
        """Return whether a place's sequence runs."""
        return place in self._running

    def holds(self, place: Place) -> bool:
        """Return whether a place's sequence runs or waits."""
        return place in self._running or place in self._waiting

    def num_to_wait(self, num_new: int, *, is_resumed: bool = False) -> int:
        """Return how many of `num_new` sequences, not weighed yet, would have to wait."""
        first = next(iter(self._waiting), None)
        if first is not None and (first.is_resumed or not is_resumed):
            return num_new
        return max(0, len(self._running) + num_new - self._max_num_seqs)

    def enter(self, place: Place) -> None:
        """Let a new sequence run, or wait at its place."""
        place.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._queue(place)
        self._let_run()

    def leave(self, place: Place) -> None:
        """Drop a sequence that has ended; those that can run now do."""
        if place in self._waiting:
            self._unqueue(place)
        else:
            self._stop(place)
        self._let_run()

    def num_beyond(self, places: Sequence[Place], blocks: tuple[int, ...]) -> int:
        """Return how many of these that run would have to wait if each needed `blocks`."""
        running = [place for place in places if place in self._running]
        num_free = list(self._num_free)
        for place in running:
            for group, num_blocks in enumerate(place.blocks):
                num_free[group] += num_blocks
        num_that_fit = min(free // num for free, num in zip(num_free, blocks, strict=True))
        return max(0, len(running) - num_that_fit)

    def weigh(self, places: Sequence[Place], num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Set what each of these places needs; the last that no longer fit have to wait.

        Args:
            places: Places that this holds, in order.
            num_tokens: The most tokens that each can reach.
            blocks: The blocks of each group that each needs.
        """
        running = [place for place in places if place in self._running]
        num_kept = len(running) - self.num_beyond(places, blocks)
        for place in running:
            self._stop(place)
        for place in places:
            if place in self._waiting:
                self.num_waiting_tokens += num_tokens - place.num_tokens
            place.num_tokens, place.blocks = num_tokens, blocks
        for place in running[:num_kept]:
            self._run(place)
        for place in running[num_kept:]:
            self._queue(place)
        self._let_run()

    def _let_run(self) -> None:
        """Let those that wait run, in order, until one does not fit."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            first = next(iter(self._waiting))
            if any(num > free for num, free in zip(first.blocks, self._num_free, strict=False)):
                return
            self._unqueue(first)
            self._run(first)
            first.note_turn()

    def _run(self, place: Place) -> None:
        self._running.add(place)
        for group, num_blocks in enumerate(place.blocks):
            self._num_free[group] -= num_blocks

    def _stop(self, place: Place) -> None:
        self._running.remove(place)
        for group, num_blocks in enumerate(place.blocks):
            self._num_free[group] += num_blocks

    def _queue(self, place: Place) -> None:
        last = next(reversed(self._waiting), place)
        self._waiting[place] = None
        self.num_waiting_tokens += place.num_tokens
        if place.turn < last.turn:
            self._waiting = dict.fromkeys(sorted(self._waiting, key=_turn))

    def _unqueue(self, place: Place) -> None:
        del self._waiting[place]
        self.num_waiting_tokens -= place.num_tokens


def _turn(place: Place) -> tuple[bool, int]:
    return place.turn
