"""The order in which those that wait have their turns, by their claims.

It holds whatever waits: sequences at a replica, parked streams at an ingress.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from math import inf
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
        self._came_s: dict[int, list[float]] = {}  # of all of a priority, sorted

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._lane_of)

    def __contains__(self, claimant: ClaimantT) -> bool:
        """Return whether it waits here."""
        return claimant in self._lane_of

    def __iter__(self) -> Iterator[ClaimantT]:
        """Yield all that wait, in order, as things stand; the queue must not change meanwhile.

        The first few cost little, however many wait.
        """
        rest = {lane: iter(held) for lane, held in self._lanes.items()}
        firsts = {lane: next(held) for lane, held in rest.items()}
        num_passed = dict.fromkeys(self._came_s, 0)  # of those in `_came_s`, by priority
        gone = Counter[tuple[int, float]]()  # those that were yielded, and are not passed yet
        while firsts:
            oldest_s = {
                priority: self._came_s[priority][num_passed[priority]] for priority, *_ in firsts
            }
            lane = self._next_lane(firsts, oldest_s)
            first = firsts.pop(lane)
            yield first
            if (following := next(rest[lane], None)) is not None:
                firsts[lane] = following
            priority, came_s = lane[0], self._came_s[lane[0]]
            gone[priority, first.came_s] += 1
            while (
                num_passed[priority] < len(came_s)
                and gone[oldest := (priority, came_s[num_passed[priority]])]
            ):
                gone[oldest] -= 1
                num_passed[priority] += 1

    @property
    def oldest_s(self) -> float:
        """When the one came that has waited longest; infinity if none waits."""
        return min((came_s[0] for came_s in self._came_s.values()), default=inf)

    @property
    def first(self) -> ClaimantT | None:
        """The next; None if none waits."""
        if not self._lanes:
            return None
        firsts = {lane: next(iter(held)) for lane, held in self._lanes.items()}
        oldest_s = {priority: came_s[0] for priority, came_s in self._came_s.items()}
        return firsts[self._next_lane(firsts, oldest_s)]

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
        insort(self._came_s.setdefault(claim.priority, []), claimant.came_s)
        held[claimant] = None
        if claimant.arrival < last.arrival:
            self._lanes[lane] = dict.fromkeys(sorted(held, key=lambda each: each.arrival))

    def remove(self, claimant: ClaimantT) -> None:
        """Take one out."""
        lane = self._lane_of.pop(claimant)
        held, came_s = self._lanes[lane], self._came_s[lane[0]]
        del held[claimant]
        if not held:
            del self._lanes[lane]
        del came_s[bisect_left(came_s, claimant.came_s)]
        if not came_s:
            del self._came_s[lane[0]]

    def _next_lane(self, firsts: Mapping[_Lane, ClaimantT], oldest_s: Mapping[int, float]) -> _Lane:
        """Return the lane whose turn it is.

        Args:
            firsts: The first of each lane.
            oldest_s: When the one of each priority came that has waited longest.
        """
        if len(firsts) == 1:
            return next(iter(firsts))
        priorities = {lane[0] for lane in firsts}
        priority = min(priorities, key=lambda each: (oldest_s[each] + each * self.aging_s, each))
        lanes = [lane for lane in firsts if lane[0] == priority]
        return min(lanes, key=lambda lane: (self._rank(lane[2]), lane[1], firsts[lane].arrival))
