"""The order in which those that wait have their turns, by their claims.

It holds whatever waits: sequences at a replica, parked streams at an ingress.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from deployments.contract.claims.claim import Claim

PRIORITY_AGING_S: Final = 60.0
"""The default of `limits.priority_aging_s`."""

Rank = tuple[float, int]
"""What tenants are sorted by: `FairShares.counter`, and how many of theirs have their turn."""


class Claimant(Hashable, Protocol):
    """What waits for its turn. While it is queued, none of these change."""

    @property
    def claim(self) -> Claim:
        """Its claim."""
        ...

    @property
    def is_resumed(self) -> bool:
        """Whether it has had a turn before, or was promised one."""
        ...

    @property
    def arrival(self) -> int:
        """Its number among all that ever came; lower is older."""
        ...

    @property
    def came_s(self) -> float:
        """When it came, moved back by what it had waited elsewhere before; by a monotonic clock."""
        ...


ClaimantT = TypeVar("ClaimantT", bound=Claimant)

_Lane = tuple[int, bool, str]
"""Its claimants' priority, whether they are new, and their tenant."""


def _all_equal(_: str) -> Rank:
    return 0.0, 0


class ClaimQueue(Generic[ClaimantT]):
    """What waits for a turn: by priority, which ages, and then by who has had less.

    Whose priority is better by one goes first, unless the other has waited `aging_s` longer: so
    none waits for ever. This compares the priorities by their claimants who have waited longest.
    Within a priority the tenant that was served least goes first (`FairShares`): what was parked
    for its sake is resumed later, and must not overtake it. Of a tenant, those that are resumed go
    first, then the oldest.
    """

    def __init__(self, aging_s: float, rank: Callable[[str], Rank] = _all_equal) -> None:
        """Start empty.

        Args:
            aging_s: Seconds of waiting that are worth one step of priority.
            rank: Returns what tenants are sorted by; it may change at any time.
        """
        self.aging_s = aging_s
        self._rank = rank
        self._lane_of: dict[ClaimantT, _Lane] = {}
        self._lanes: dict[_Lane, dict[ClaimantT, None]] = {}  # each in order of arrival

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._lane_of)

    def __contains__(self, claimant: ClaimantT) -> bool:
        """Return whether it waits here."""
        return claimant in self._lane_of

    def __iter__(self) -> Iterator[ClaimantT]:
        """Yield all that wait, in order, as things stand; changes meanwhile are not seen."""
        rest = ClaimQueue[ClaimantT](self.aging_s, self._rank)
        rest._lane_of = dict(self._lane_of)
        rest._lanes = {lane: dict(held) for lane, held in self._lanes.items()}
        while (first := rest.first) is not None:
            yield first
            rest.remove(first)

    @property
    def is_uniform(self) -> bool:
        """Whether all that wait have one priority and one tenant, so that nothing is to weigh."""
        return len(self._lanes) <= 1 or len({(lane[0], lane[2]) for lane in self._lanes}) == 1

    @property
    def first(self) -> ClaimantT | None:
        """The next; None if none waits."""
        if not self._lanes:
            return None
        if len(self._lanes) == 1:
            return next(iter(next(iter(self._lanes.values()))))
        priority = self._next_priority()
        lanes = [lane for lane in self._lanes if lane[0] == priority]
        return next(iter(self._lanes[min(lanes, key=self._turn)]))

    @property
    def unordered(self) -> Collection[ClaimantT]:
        """All that wait, in no order."""
        return self._lane_of.keys()

    def add(self, claimant: ClaimantT) -> None:
        """Let one wait; its place is that of its arrival."""
        claim = claimant.claim
        lane = (claim.priority, not claimant.is_resumed, claim.tenant)
        held = self._lanes.setdefault(lane, {})
        last = next(reversed(held), claimant)
        self._lane_of[claimant] = lane
        held[claimant] = None
        if claimant.arrival < last.arrival:
            self._lanes[lane] = dict.fromkeys(sorted(held, key=lambda each: each.arrival))

    def remove(self, claimant: ClaimantT) -> None:
        """Take one out."""
        lane = self._lane_of.pop(claimant)
        held = self._lanes[lane]
        del held[claimant]
        if not held:
            del self._lanes[lane]

    def _next_priority(self) -> int:
        """Return the priority whose turn it is, by its own and by who has waited longest."""
        priorities = {lane[0] for lane in self._lanes}
        if len(priorities) == 1:
            return priorities.pop()
        came_s = dict.fromkeys(priorities, float("inf"))
        for lane, held in self._lanes.items():
            came_s[lane[0]] = min(came_s[lane[0]], min(each.came_s for each in held))
        return min(priorities, key=lambda each: (came_s[each] + each * self.aging_s, each))

    def _turn(self, lane: _Lane) -> tuple[Rank, bool, int]:
        _, is_new, tenant = lane
        return self._rank(tenant), is_new, next(iter(self._lanes[lane])).arrival
