"""Which models of a group have a turn on the device that they share: no clock, no Ray."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Final

SWAPS_IN_A_TURN: Final = 3
"""How many times as long as a swap a turn lasts at least, so that three quarters are worked."""

MIN_TURN_S: Final = 30.0
"""The least length of a turn before a swap was measured: one takes about 10 s on a CPU."""

SHORTEST_TURN_S: Final = 10.0
"""After fast swaps: parked streams compute their tokens again, so shorter turns don't pay."""

LONGEST_TURN_S: Final = 120.0
"""The least length after slow swaps: others wait for it."""

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
    """A turn: when it was given, when the model first ran in it, and since when that is missing.

    `given_s` is None if that is not known, or the model ran before.
    """

    given_s: float | None
    began_s: float | None = None
    missing_since_s: float | None = None


class Turns:
    """Says which models of one group have a turn.

    Each model takes a part of the device, and those have a turn together whose parts fit on it. A
    turn ends only if another model waits and needs the room. Models get their turns in the order in
    which they began to wait: while the first of them has no room, no other one takes what is free.

    A turn lasts at least `min_turn_s` from when a replica runs, or until the model has no more
    work. If no length is given it follows the swaps, each of which lasts from when a turn is given
    until a replica runs: `SWAPS_IN_A_TURN` times the median of each model's last one.

    A model whose turn has just ended takes no working model's place for as long, or two that wait
    for the same room would throw each other out. A model whose replica is missing in its turn keeps
    it until that runs again: streams that lost theirs wait for it only for a limited time.
    After `max_start_s` without one the turn ends, too.

    A model that an operator has pinned counts as one with work, and keeps its turn while it runs.

    Attributes:
        models: The models of the group; at the start the first goes first.
    """

    def __init__(
        self, parts: Mapping[str, float], min_turn_s: float | None, max_start_s: float
    ) -> None:
        """Start without a turn.

        Args:
            parts: The part of the device that each model of the group takes, of 1.
            min_turn_s: The least length of a turn while others wait, in seconds; None lets it
                follow the swaps.
            max_start_s: The most seconds that a turn goes on without a running replica.
        """
        self.models: Sequence[str] = tuple(parts)
        self._parts = parts
        self._given_min_turn_s = min_turn_s
        self._swap_s: dict[str, float] = {}  # how long each model's last swap took
        self._max_start_s = max_start_s
        self._turns: dict[str, _Turn] = {}  # in the order in which they were given
        self._waiting_since_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        """The models that have a turn, the oldest turn first; none at the start."""
        return tuple(self._turns)

    @property
    def min_turn_s(self) -> float:
        """The least length of a turn while others wait, in seconds."""
        if self._given_min_turn_s is not None:
            return self._given_min_turn_s
        if not self._swap_s:
            return MIN_TURN_S
        length_s = SWAPS_IN_A_TURN * statistics.median(self._swap_s.values())
        return min(max(length_s, SHORTEST_TURN_S), LONGEST_TURN_S)

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
        for name, turn in self._turns.items():
            self._note(name, turn, now_s, states[name])
        uses = {name: self._use_of(turn, now_s, states[name]) for name, turn in self._turns.items()}
        pinned = [self._parts[name] for name, use in uses.items() if use is _Use.PINNED]
        for name in sorted(self._waiting_since_s, key=self._waiting_since_s.__getitem__):
            has_rested = now_s - self._ended_s.get(name, -inf) >= self.min_turn_s
            leaving = self._leaving_for(name, uses, _Use.ENOUGH if has_rested else _Use.NONE)
            if leaving is not None:
                for each in leaving:
                    del self._turns[each]
                    self._ended_s[each] = now_s
                self.begin(name, now_s)
            elif has_rested and fit_together([self._parts[name], *pinned]):
                break
        return self.holders

    def begin(self, name: str, now_s: float | None = None) -> None:
        """Give a model a turn.

        Args:
            name: The model.
            now_s: The time of the clock, if a swap begins; None for a turn that goes on.
        """
        self._turns[name] = _Turn(now_s)
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

    def _note(self, name: str, turn: _Turn, now_s: float, state: ModelState) -> None:
        """Note since when a model runs in its turn, or is missing, and how long its swap took."""
        if state.is_running:
            turn.missing_since_s = None
            if turn.began_s is None:
                turn.began_s = now_s
                if turn.given_s is not None:
                    self._swap_s[name] = now_s - turn.given_s
                    turn.given_s = None
        elif not state.has_work:
            turn.given_s = turn.began_s = turn.missing_since_s = None
        elif turn.missing_since_s is None:
            turn.missing_since_s = now_s

    def _use_of(self, turn: _Turn, now_s: float, state: ModelState) -> _Use:
        """Return what a model makes of its turn."""
        if state.is_running and state.is_pinned:
            return _Use.PINNED
        if not state.has_work:
            return _Use.NONE
        if state.is_running:
            assert turn.began_s is not None, "it was noted"
            return _Use.ENOUGH if now_s - turn.began_s >= self.min_turn_s else _Use.YOUNG
        assert turn.missing_since_s is not None, "it was noted"
        return _Use.NONE if now_s - turn.missing_since_s >= self._max_start_s else _Use.YOUNG


def _claim(state: ModelState) -> tuple[bool, bool, bool, bool]:
    """Return how good a model's claim to the first turn is."""
    return state.is_running, state.is_pinned, state.has_work, state.is_wanted
