"""A device whose turns `deployments.turns` decides, in simulated time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deployments.turns.planner import ModelState, Turns

TICK_S = 0.5


@dataclass
class Asked:
    """One request: when it comes, and how much of its model's time it needs.

    Attributes:
        model: The model.
        came_s: When it comes.
        work_s: What is left of the seconds for which its model has to run.
        begun_s: When its model ran for the first time since it came.
        turns_waited: Turns of other models that were given while it was there.
    """

    model: str
    came_s: float
    work_s: float
    begun_s: float | None = None
    turns_waited: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it is answered."""
        return self.work_s <= 0


@dataclass
class Device:
    """A device on which requests run side by side as soon as their model does.

    Attributes:
        turns: Decides.
        requests: All that come.
        start_s: Seconds from the decision until a model runs.
        breaks: Models that never load.
        begun: When each turn was given, and to which model.
        worked_s: Seconds in which at least one model worked.
        now_s: The time.
    """

    turns: Turns
    requests: Iterable[Asked]
    start_s: float
    breaks: frozenset[str] = frozenset()
    begun: list[tuple[float, str]] = field(default_factory=list)
    worked_s: float = 0.0
    now_s: float = 0.0
    _ready_s: dict[str, float] = field(default_factory=dict)

    def run(self, until_s: float) -> None:
        """Go on from the first request until all are done, or this time."""
        self.requests = list(self.requests)
        self.now_s = min(each.came_s for each in self.requests)
        while self.now_s < until_s and not all(each.is_done for each in self.requests):
            self._tick([each for each in self.requests if each.came_s <= self.now_s])

    def _tick(self, come: Iterable[Asked]) -> None:
        here = [each for each in come if not each.is_done]
        holders = self.turns.update(self.now_s, self._states({each.model for each in here}))
        for name in holders:
            if name not in self._ready_s:
                self.begun.append((self.now_s, name))
                for each in here:
                    each.turns_waited += each.model not in holders
        self._ready_s = {
            name: self._ready_s.get(name, self.now_s + self.start_s) for name in holders
        }
        working = [each for each in here if self._is_running(each.model)]
        for each in working:
            each.begun_s = self.now_s if each.begun_s is None else each.begun_s
            each.work_s -= TICK_S
        self.worked_s += TICK_S * bool(working)
        self.now_s += TICK_S

    def _states(self, with_work: set[str]) -> Mapping[str, ModelState]:
        return MappingProxyType(
            {
                name: ModelState(
                    is_running=self._is_running(name),
                    is_wanted=name in self._ready_s,
                    has_work=name in with_work,
                )
                for name in self.turns.models
            }
        )

    def _is_running(self, name: str) -> bool:
        ready_s = self._ready_s.get(name)
        return ready_s is not None and self.now_s >= ready_s and name not in self.breaks

    @property
    def num_loads(self) -> int:
        """How often a model was loaded."""
        return len(self.begun)

    @property
    def longest_wait_s(self) -> float:
        """The longest time from when a request came until its model ran."""
        begun = [(each.begun_s, each.came_s) for each in self.requests]
        return max(begun_s - came_s for begun_s, came_s in begun if begun_s is not None)
