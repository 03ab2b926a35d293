"""Which models of a group have a turn on the device that they share: no clock, no Ray."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MIN_TURN_S: Final = 30.0
"""A swap on a CPU takes about 10 s, so that at least three quarters of the time are worked."""

MAX_START_S: Final = 600.0
"""Weights may have to be downloaded first."""

ROUNDING: Final = 1e-6
"""By which parts such as 0.7, 0.2 and 0.1 may miss the whole device."""


def fit_together(parts: Iterable[float]) -> bool:
    """Return whether models that take these parts of a device can have turns at the same time."""
    return sum(parts) <= 1 + ROUNDING


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the controller knows of one model of a group.

    Attributes:
        is_running: Whether a replica runs; of a light group, one that is awake.
        is_wanted: Whether one shall run, by the last decision.
        has_work: Whether anything runs or waits, or did a few seconds ago; or it is pinned.
        is_pinned: Whether an operator wants it to keep its turn.
    """

    is_running: bool
    is_wanted: bool
    has_work: bool
    is_pinned: bool = False


class _Use(IntEnum):
    """What a model makes of its turn."""

    NONE = 0  # idle, or it does not start: the turn ends for any model that waits
    ENOUGH = 1  # it has lasted `min_turn_s`: it ends for one that has waited as long
    YOUNG = 2
    PINNED = 3  # it runs and goes on, whoever waits


@dataclass(slots=True)
class _Turn:
    """A turn: when the model first ran in it, and since when its replica is missing."""

    began_s: float | None = None
    missing_since_s: float | None = None


class Turns:
    """Says which models of one group have a turn.

    Each model takes a part of the device, and those have a turn together whose parts fit on it. A
    turn ends only if another model waits and needs the room. Models get their turns in the order in
    which they began to wait: while the first of them has no room, no other one takes what is free.

    A turn lasts at least `min_turn_s` from when a replica runs, or until the model has no more
    work. A model whose turn has just ended takes no working model's place for as long, or two that
    wait for the same room would throw each other out. A model whose replica is missing in its turn
    keeps it until that runs again: streams that lost theirs wait for it only for a limited time.
    After `max_start_s` without one the turn ends, too.

    A model that an operator has pinned counts as one with work, and keeps its turn while it runs.

    Attributes:
        models: The models of the group; at the start the first goes first.
    """

    def __init__(self, parts: Mapping[str, float], min_turn_s: float, max_start_s: float) -> None:
        """Start without a turn.

        Args:
            parts: The part of the device that each model of the group takes, of 1.
            min_turn_s: The least length of a turn while others wait, in seconds.
            max_start_s: The most seconds that a turn goes on without a running replica.
        """
        self.models: Sequence[str] = tuple(parts)
        self._parts = parts
        self._min_turn_s = min_turn_s
        self._max_start_s = max_start_s
        self._turns: dict[str, _Turn] = {}  # in the order in which they were given
        self._waiting_since_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        """The models that have a turn, the oldest turn first; none at the start."""
        return tuple(self._turns)

    def update(self, now_s: float, states: Mapping[str, ModelState]) -> tuple[str, ...]:
        """Return the models that have a turn from now on.

        Args:
            now_s: The time of a monotonic clock, in seconds.
            states: The state of each model of the group.
        """
        if not self._turns:
            self._begin_first(states)
        for name in self.models:
            if name not in self._turns and states[name].has_work:
                self._waiting_since_s.setdefault(name, now_s)
            else:
                self._waiting_since_s.pop(name, None)
        uses = {name: self._use_of(turn, now_s, states[name]) for name, turn in self._turns.items()}
        pinned = [self._parts[name] for name, use in uses.items() if use is _Use.PINNED]
        for name in sorted(self._waiting_since_s, key=self._waiting_since_s.__getitem__):
            has_rested = now_s - self._ended_s.get(name, -self._min_turn_s) >= self._min_turn_s
            leaving = self._leaving_for(name, uses, _Use.ENOUGH if has_rested else _Use.NONE)
            if leaving is not None:
                for each in leaving:
                    del self._turns[each]
                    self._ended_s[each] = now_s
                self.begin(name)
            elif has_rested and fit_together([self._parts[name], *pinned]):
                break
        return self.holders

    def begin(self, name: str) -> None:
        """Give a model a turn."""
        self._turns[name] = _Turn()
        self._waiting_since_s.pop(name, None)

    def _begin_first(self, states: Mapping[str, ModelState]) -> None:
        """Give the first turns: to models that run or shall run, or else to one with work."""
        first, *others = sorted(self.models, key=lambda each: _claim(states[each]), reverse=True)
        self.begin(first)
        for name in others:
            shall_run = states[name].is_running or states[name].is_wanted
            if shall_run and self._lack_of(name) <= 0:
                self.begin(name)

    def _lack_of(self, name: str) -> float:
        """Return the part of the device that a model needs beyond what is free."""
        taken = sum(self._parts[each] for each in self._turns)
        return taken + self._parts[name] - 1 - ROUNDING

    def _leaving_for(self, name: str, uses: Mapping[str, _Use], most: _Use) -> list[str] | None:
        """Return the models that make room for another one; None if they can't.

        Those with the least use of their turns go first, then those with the oldest turns; and none
        goes without need.

        Args:
            name: The model that needs room.
            uses: What each model with a turn makes of it; a turn that has just been given is new.
            most: The most use that a turn may have which ends.
        """
        ends = [each for each in self._turns if uses.get(each, _Use.YOUNG) <= most]
        lack, leaving = self._lack_of(name), list[str]()
        for each in sorted(ends, key=uses.__getitem__):
            if lack <= 0:
                break
            leaving.append(each)
            lack -= self._parts[each]
        for each in reversed(leaving[:-1]):  # a larger one that came later may do
            if lack + self._parts[each] <= 0:
                leaving.remove(each)
                lack += self._parts[each]
        return leaving if lack <= 0 else None

    def _use_of(self, turn: _Turn, now_s: float, state: ModelState) -> _Use:
        """Return what a model makes of its turn; note since when that has lasted."""
        if state.is_running:
            turn.missing_since_s = None
            if turn.began_s is None:
                turn.began_s = now_s
            if state.is_pinned:
                return _Use.PINNED
            if not state.has_work:
                return _Use.NONE
            return _Use.ENOUGH if now_s - turn.began_s >= self._min_turn_s else _Use.YOUNG
        if not state.has_work:
            turn.began_s = turn.missing_since_s = None
            return _Use.NONE
        if turn.missing_since_s is None:
            turn.missing_since_s = now_s
        return _Use.NONE if now_s - turn.missing_since_s >= self._max_start_s else _Use.YOUNG


def _claim(state: ModelState) -> tuple[bool, bool, bool, bool]:
    """Return how good a model's claim to the first turn is."""
    return state.is_running, state.is_pinned, state.has_work, state.is_wanted
