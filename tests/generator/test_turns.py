from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.generator.turns import Place, Turns
from deployments.plan.kv_layout import KVLayout

LAYOUT = KVLayout(capacities=(12, 4), num_blocks=(8, 5), block_size=2)


def places(turns: Turns, num: int) -> list[Place]:
    made = [Place() for _ in range(num)]
    for place in made:
        turns.enter(place)
    return made


def weigh(turns: Turns, place: Place, num_tokens: int) -> None:
    turns.weigh([place], num_tokens, LAYOUT.blocks_for(num_tokens))


def test_sequences_run_while_their_blocks_fit() -> None:
    turns = Turns(4, LAYOUT)
    first, second, third = places(turns, 3)
    weigh(turns, first, 8)  # 4 of 8 blocks, and 2 of 5
    weigh(turns, second, 8)
    weigh(turns, third, 1)
    assert [turns.is_running(each) for each in (first, second, third)] == [True, True, False]
    turns.leave(second)
    assert turns.is_running(third)


def test_each_group_s_blocks_must_suffice() -> None:
    turns = Turns(4, LAYOUT)
    small = places(turns, 3)
    for place in small:
        weigh(turns, place, 4)  # 2 of 8 blocks, and 2 of 5
    assert [turns.is_running(each) for each in small] == [True, True, False]


def test_none_overtakes_one_that_does_not_fit() -> None:
    turns = Turns(4, LAYOUT)
    large, larger = places(turns, 2)
    weigh(turns, large, 12)
    weigh(turns, larger, 12)
    (small,) = places(turns, 1)
    assert [*turns.waiting] == [larger, small]
    turns.leave(larger)
    assert turns.is_running(small)


def test_what_is_not_weighed_counts_without_blocks() -> None:
    turns = Turns(4, LAYOUT)
    unknown, *others = places(turns, 3)
    for place in others:
        weigh(turns, place, 8)
    assert turns.num_running == 3
    weigh(turns, unknown, 2)
    assert [*turns.waiting] == [unknown]


def test_one_that_no_longer_runs_waits_at_its_place() -> None:
    turns = Turns(3, LAYOUT)
    first, second, third, last = places(turns, 4)
    weigh(turns, first, 12)
    weigh(turns, third, 2)
    weigh(turns, second, 12)
    assert [*turns.waiting] == [second, last]
    assert turns.num_waiting_tokens == 12


def test_the_last_of_a_group_wait_if_not_all_fit() -> None:
    turns = Turns(4, LAYOUT)
    group = places(turns, 4)
    blocks = LAYOUT.blocks_for(3)  # 2 of 8, and 2 of 5
    assert turns.num_beyond(group, blocks) == 2
    turns.weigh(group, 3, blocks)
    assert [*turns.waiting] == group[2:]
    assert turns.num_waiting_tokens == 6


@dataclass
class NaiveTurns:
    """Says the same by trying each sequence."""

    max_num_seqs: int
    arrivals: list[Place] = field(default_factory=list)
    needs: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    running: list[Place] = field(default_factory=list)

    @property
    def waiting(self) -> list[Place]:
        held = [place for place in self.arrivals if place not in self.running]
        return sorted(held, key=lambda place: not place.is_resumed)

    def enter(self, place: Place) -> None:
        self.arrivals.append(place)
        self.needs[place] = (0, 0)
        self.let_run()

    def leave(self, place: Place) -> None:
        self.arrivals.remove(place)
        self.running = [each for each in self.running if each is not place]
        self.let_run()

    def weigh(self, due: Sequence[Place], blocks: tuple[int, ...]) -> int:
        """Return how many that ran have to wait."""
        ran = [place for place in due if place in self.running]
        self.running = [place for place in self.running if place not in ran]
        self.needs.update(dict.fromkeys(due, blocks))
        num_beyond = 0
        for place in ran:
            if self.fits(place):
                self.running.append(place)
            else:
                num_beyond += 1
        self.let_run()
        return num_beyond

    def fits(self, place: Place) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        needs = [self.needs[each] for each in (*self.running, place)]
        used = (sum(group) for group in zip(*needs, strict=True))
        return all(num <= most for num, most in zip(used, LAYOUT.num_blocks, strict=True))

    def let_run(self) -> None:
        while self.waiting and self.fits(self.waiting[0]):
            self.running.append(self.waiting[0])


class TurnsMachine(RuleBasedStateMachine):
    """Lets sequences come, be weighed and end at random."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(4, LAYOUT)
        self.naive = NaiveTurns(4)

    def drawn(self, data: st.DataObject, max_size: int) -> list[Place]:
        held = self.naive.arrivals
        indices = st.sets(st.integers(0, len(held) - 1), min_size=1, max_size=max_size)
        return [held[i] for i in sorted(data.draw(indices))]

    @rule(is_resumed=st.booleans())
    def enter(self, is_resumed: bool) -> None:
        place = Place(is_resumed=is_resumed)
        num_to_wait = self.turns.num_to_wait(1, is_resumed=is_resumed)
        self.turns.enter(place)
        self.naive.enter(place)
        assert num_to_wait == (place in self.naive.waiting)

    @rule(num=st.integers(1, 6))
    def enter_together(self, num: int) -> None:
        num_to_wait = self.turns.num_to_wait(num)
        made = places(self.turns, num)
        for place in made:
            self.naive.enter(place)
        assert num_to_wait == sum(place in self.naive.waiting for place in made)

    @precondition(lambda self: self.naive.arrivals)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def weigh(self, data: st.DataObject, num_tokens: int) -> None:
        due, blocks = self.drawn(data, 4), LAYOUT.blocks_for(num_tokens)
        num_beyond = self.turns.num_beyond(due, blocks)
        self.turns.weigh(due, num_tokens, blocks)
        assert self.naive.weigh(due, blocks) == num_beyond

    @precondition(lambda self: self.naive.arrivals)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        for place in self.drawn(data, 1):
            self.turns.leave(place)
            self.naive.leave(place)

    @invariant()
    def the_same_run_and_wait(self) -> None:
        assert [*self.turns.waiting] == self.naive.waiting
        assert {p for p in self.naive.arrivals if self.turns.is_running(p)} == {*self.naive.running}
        counts = (self.turns.num_running, self.turns.num_waiting, self.turns.num_waiting_tokens)
        waiting = self.naive.waiting
        tokens = sum(place.num_tokens for place in waiting)
        assert counts == (len(self.naive.running), len(waiting), tokens)

    def teardown(self) -> None:
        for place in self.naive.arrivals:
            self.turns.leave(place)
        assert self.turns.num_running == self.turns.num_waiting == 0
        assert self.turns.num_beyond(places(self.turns, 1), LAYOUT.num_blocks) == 0


TestTurnsMachine = pytest.mark.slow(TurnsMachine.TestCase)
TestTurnsMachine.settings = settings(max_examples=100, deadline=None)
