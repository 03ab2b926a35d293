"""The permit of one sequence: its right to run or to wait, and what it may claim beside others.

A sequence has one from its arrival at a replica to its end, before it is weighed and while it is
not in the engine, too. `run_estimate` says which permits run.
"""

import asyncio
from typing import Protocol

from deployments.contract.claims import NO_CLAIM, Claim


class Run(Protocol):
    """An accepted sequence, which goes into the engine and may leave it before its end."""

    @property
    def is_in(self) -> bool:
        """Whether the engine has it."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun with it, since it entered."""
        ...

    @property
    def may_yield(self) -> bool:
        """Whether it may give its place to another."""
        ...

    @property
    def is_parkable(self) -> bool:
        """Whether its ingress takes it back once it waits, to offer it again later."""
        ...

    @property
    def may_park(self) -> bool:
        """Whether it is parkable now: the engine has not begun with it."""
        ...

    def enter(self, *, goes_first: bool) -> None:
        """Go into the engine, with what it has gained until now.

        Args:
            goes_first: Whether to go before others that wait in the engine and don't.
        """
        ...

    def leave(self) -> None:
        """Leave the engine; what was under way there is generated again."""
        ...

    def note_turn(self, *, is_running: bool) -> None:
        """Note whether it has its turn now."""
        ...

    def park(self) -> None:
        """Leave for good: its ingress gets it back."""
        ...

    def abort(self) -> None:
        """Leave for good: it goes on elsewhere."""
        ...


class Permit:
    """The right of one sequence to run or to wait.

    Attributes:
        claim: What it may claim beside others.
        num_tokens: The most tokens that it can reach; 0 until it is weighed.
        blocks: The blocks of each group that it needs; none until it is weighed.
        arrival: Its number among all that ever came; lower is older.
        came_s: When it came, moved back by what it had waited before; by a monotonic clock.
        siblings: The permits of its group's other sequences, if it is the first of a group.
        unclaimed: Those of them that no sequence has claimed yet.
        is_resumed: Whether another replica had accepted it, or it has run here before.
        is_planned: Whether that replica still runs it.
        is_offered: Whether its ingress offers it as one that was parked.
        is_bounded: Whether the limits on what waits apply to it.
        num_owed: How many others must be parked for it and its siblings, once they are weighed.
        is_parkable: Whether its ingress takes it back once it is accepted and waits.
        may_be_refused: Whether it may have to make room for another before that: it is new, alone,
            and not weighed.
        has_made_room: Whether it had to; its request learns that when it is weighed.
        run: The sequence once it is accepted; None before, and after it has left.
        num_displaced: How often another has taken its place here.
    """

    def __init__(
        self,
        siblings: "tuple[Permit, ...]" = (),
        *,
        claim: Claim | None = None,
        is_resumed: bool = False,
        is_planned: bool = False,
    ) -> None:
        """Start without a known size."""
        self.claim = claim or NO_CLAIM
        self.num_tokens = 0
        self.blocks: tuple[int, ...] = ()
        self.arrival = 0
        self.came_s = 0.0
        self.siblings = siblings
        self.unclaimed = list(siblings)
        self.is_resumed = is_resumed
        self.is_planned = is_planned
        self.is_offered = False
        self.is_bounded = not is_resumed
        self.num_owed = 0
        self.is_parkable = self.may_be_refused = self.has_made_room = False
        self.run: Run | None = None
        self.num_displaced = 0
        self._waited_s = 0.0
        self._runs = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether the sequence would run if it were in the engine."""
        return self._runs.is_set()

    @property
    def may_make_room(self) -> bool:
        """Whether it may leave what waits: it would be parked, or refused if it is not accepted."""
        return self.may_be_refused if self.run is None else self.run.may_park

    async def wait_for_turn(self) -> None:
        """Wait until the sequence would run if it were in the engine."""
        await self._runs.wait()

    def note_arrival(self, number: int, now_s: float) -> None:
        """Note that it comes now."""
        self.arrival = number
        self.came_s = now_s - self.claim.waited_s

    def note_running(self, now_s: float) -> None:
        """Note that the sequence would run, and wake `wait_for_turn`."""
        self._waited_s = now_s - self.came_s
        self._runs.set()

    def note_waiting(self) -> None:
        """Note that the sequence would wait."""
        self._runs.clear()

    def note_displaced(self, now_s: float) -> None:
        """Note that another has taken its place: it waits from now on, before new ones."""
        self.came_s = now_s - self._waited_s
        self.is_resumed = True
        self.num_displaced += 1

    def yields_to(self, other: "Permit", aging_s: float, now_s: float) -> bool:
        """Return whether it gives its place to one that waits."""
        mine, theirs = self.claim.priority, other.claim.priority
        if self.run is None or not self.run.may_yield or theirs >= mine:
            return False
        return other.came_s + theirs * aging_s < now_s - self._waited_s + mine * aging_s
