from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.generator.admission.permit import Permit
from deployments.generator.admission.run_estimate import RunEstimate
from deployments.plan.kv_layout import KVLayout

LAYOUT = KVLayout(capacities=(12, 4), num_blocks=(8, 5), block_size=2)


def permits(estimate: RunEstimate, num: int) -> list[Permit]:
    made = [Permit() for _ in range(num)]
    for permit in made:
        estimate.enter(permit)
    return made


def weigh(estimate: RunEstimate, permit: Permit, num_tokens: int) -> None:
    estimate.weigh([permit], num_tokens, LAYOUT.blocks_for(num_tokens))


def test_sequences_run_while_their_blocks_fit() -> None:
    estimate = RunEstimate(4, LAYOUT)
    first, second, third = permits(estimate, 3)
    weigh(estimate, first, 8)  # 4 of 8 blocks, and 2 of 5
    weigh(estimate, second, 8)
    weigh(estimate, third, 1)
    assert [each.is_running for each in (first, second, third)] == [True, True, False]
    estimate.leave(second)
    assert third.is_running


def test_each_group_s_blocks_must_suffice() -> None:
    estimate = RunEstimate(4, LAYOUT)
    small = permits(estimate, 3)
    for permit in small:
        weigh(estimate, permit, 4)  # 2 of 8 blocks, and 2 of 5
    assert [each.is_running for each in small] == [True, True, False]


def test_none_overtakes_one_that_does_not_fit() -> None:
    estimate = RunEstimate(4, LAYOUT)
    large, larger = permits(estimate, 2)
    weigh(estimate, large, 12)
    weigh(estimate, larger, 12)
    (small,) = permits(estimate, 1)
    assert [*estimate.waiting] == [larger, small]
    estimate.leave(larger)
    assert small.is_running


def test_what_is_not_weighed_counts_without_blocks() -> None:
    estimate = RunEstimate(4, LAYOUT)
    unknown, *others = permits(estimate, 3)
    for permit in others:
        weigh(estimate, permit, 8)
    assert estimate.num_running == 3
    weigh(estimate, unknown, 2)
    assert [*estimate.waiting] == [unknown]


def test_one_that_no_longer_runs_waits_at_its_place() -> None:
    estimate = RunEstimate(3, LAYOUT)
    first, second, third, last = permits(estimate, 4)
    weigh(estimate, first, 12)
    weigh(estimate, third, 2)
    weigh(estimate, second, 12)
    assert [*estimate.waiting] == [second, last]
    assert estimate.num_waiting_tokens == 12


def test_the_last_of_a_group_wait_if_not_all_fit() -> None:
    estimate = RunEstimate(4, LAYOUT)
    group = permits(estimate, 4)
    blocks = LAYOUT.blocks_for(3)  # 2 of 8, and 2 of 5
    assert estimate.num_beyond(group, blocks) == 2
    estimate.weigh(group, 3, blocks)
    assert [*estimate.waiting] == group[2:]
    assert estimate.num_waiting_tokens == 6


def test_a_permit_leaves_once() -> None:
    estimate = RunEstimate(4, LAYOUT)
    (permit,) = permits(estimate, 1)
    estimate.leave(permit)
    with pytest.raises(AssertionError, match="once"):
        estimate.leave(permit)
    assert estimate.num_running == 0


@dataclass
class NaiveEstimate:
    """Says the same by trying each sequence."""

    max_num_seqs: int
    arrivals: list[Permit] = field(default_factory=list)
    needs: dict[Permit, tuple[int, ...]] = field(default_factory=dict)
    running: list[Permit] = field(default_factory=list)

    @property
    def waiting(self) -> list[Permit]:
        held = [permit for permit in self.arrivals if permit not in self.running]
        return sorted(held, key=lambda permit: not permit.is_resumed)

    def enter(self, permit: Permit) -> None:
        self.arrivals.append(permit)
        self.needs[permit] = (0, 0)
        self.let_run()

    def leave(self, permit: Permit) -> None:
        self.arrivals.remove(permit)
        self.running = [each for each in self.running if each is not permit]
        self.let_run()

    def weigh(self, due: Sequence[Permit], blocks: tuple[int, ...]) -> int:
        """Return how many that ran have to wait."""
        ran = [permit for permit in due if permit in self.running]
        self.running = [permit for permit in self.running if permit not in ran]
        self.needs.update(dict.fromkeys(due, blocks))
        num_beyond = 0
        for permit in ran:
            if self.fits(permit):
                self.running.append(permit)
            else:
                num_beyond += 1
        self.let_run()
        return num_beyond

    def fits(self, permit: Permit) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        needs = [self.needs[each] for each in (*self.running, permit)]
        used = (sum(group) for group in zip(*needs, strict=True))
        return all(num <= most for num, most in zip(used, LAYOUT.num_blocks, strict=True))

    def let_run(self) -> None:
        while self.waiting and self.fits(self.waiting[0]):
            self.running.append(self.waiting[0])


class EstimateMachine(RuleBasedStateMachine):
    """Lets sequences come, be weighed and end at random."""

    def __init__(self) -> None:
        super().__init__()
        self.estimate = RunEstimate(4, LAYOUT)
        self.naive = NaiveEstimate(4)

    def drawn(self, data: st.DataObject, max_size: int) -> list[Permit]:
        held = self.naive.arrivals
        indices = st.sets(st.integers(0, len(held) - 1), min_size=1, max_size=max_size)
        return [held[i] for i in sorted(data.draw(indices))]

    @rule(is_resumed=st.booleans())
    def enter(self, is_resumed: bool) -> None:
        permit = Permit(is_resumed=is_resumed)
        num_to_wait = self.estimate.num_to_wait(1, is_resumed=is_resumed)
        self.estimate.enter(permit)
        self.naive.enter(permit)
        assert num_to_wait == (permit in self.naive.waiting)

    @rule(num=st.integers(1, 6))
    def enter_together(self, num: int) -> None:
        num_to_wait = self.estimate.num_to_wait(num)
        made = permits(self.estimate, num)
        for permit in made:
            self.naive.enter(permit)
        assert num_to_wait == sum(permit in self.naive.waiting for permit in made)

    @precondition(lambda self: self.naive.arrivals)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def weigh(self, data: st.DataObject, num_tokens: int) -> None:
        due, blocks = self.drawn(data, 4), LAYOUT.blocks_for(num_tokens)
        num_beyond = self.estimate.num_beyond(due, blocks)
        self.estimate.weigh(due, num_tokens, blocks)
        assert self.naive.weigh(due, blocks) == num_beyond

    @precondition(lambda self: self.naive.arrivals)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        for permit in self.drawn(data, 1):
            self.estimate.leave(permit)
            self.naive.leave(permit)

    @invariant()
    def the_same_run_and_wait(self) -> None:
        assert [*self.estimate.waiting] == self.naive.waiting
        assert {p for p in self.naive.arrivals if p.is_running} == {*self.naive.running}
        counts = (
            self.estimate.num_running,
            self.estimate.num_waiting,
            self.estimate.num_waiting_tokens,
        )
        waiting = self.naive.waiting
        tokens = sum(permit.num_tokens for permit in waiting)
        assert counts == (len(self.naive.running), len(waiting), tokens)

    def teardown(self) -> None:
        for permit in self.naive.arrivals:
            self.estimate.leave(permit)
        assert self.estimate.num_running == self.estimate.num_waiting == 0
        assert self.estimate.num_beyond(permits(self.estimate, 1), LAYOUT.num_blocks) == 0


TestEstimateMachine = pytest.mark.slow(EstimateMachine.TestCase)
TestEstimateMachine.settings = settings(max_examples=100, deadline=None)
