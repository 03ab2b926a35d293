"""No sequence in the waiting queue is overtaken, however small the later ones are."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.output import FinishReason
from deployments.engine.scheduling.scheduler import Scheduler, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceState
from tests.engine.scheduling.test_scheduler import complete, make_scheduler, sequence

NUM_GENERATED = 4
"""Tokens that each sequence generates before it ends."""


class Flood:
    """A scheduler under an endless stream of short prompts."""

    def __init__(self, scheduler: Scheduler, num_per_step: int, *, shares_prefix: bool) -> None:
        self.scheduler = scheduler
        self._num_per_step = num_per_step
        self._shares_prefix = shares_prefix
        self._serial = count()

    def pour(self) -> None:
        for _ in range(self._num_per_step):
            self.scheduler.add(
                sequence(f"short{next(self._serial)}", 18, shares_prefix=self._shares_prefix)
            )

    def step(self, max_step_tokens: int) -> StepPlan:
        """Run a step and end finished sequences; check that only the queue's front was admitted."""
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        plan = scheduler.schedule()
        assert plan.admitted == waiting[: len(plan.admitted)]
        complete(plan)
        for seq in scheduler.running:
            if len(seq.token_ids) >= seq.num_prompt_tokens + NUM_GENERATED:
                seq.finish(FinishReason.LENGTH)
                scheduler.remove(seq)
        scheduler.max_step_tokens = max_step_tokens
        for seq in scheduler.excess:
            scheduler.preempt(seq)
        turns = [seq.turn for seq in scheduler.waiting]
        assert turns == sorted(turns)
        return plan


def bound(ahead: tuple[Sequence, ...], aged: Sequence, num_shortages: int) -> int:
    """Return the steps within which a sequence must end, however many arrive after it.

    Each step computes a token of a prompt that is not newer, or all places decode, and then one is
    free after NUM_GENERATED steps. Each memory shortage may force all of it to be recomputed.
    """
    num_tokens = sum(len(seq.token_ids) + NUM_GENERATED + 1 for seq in (*ahead, aged))
    return num_tokens * (1 + num_shortages)


@given(
    max_num_seqs=st.integers(1, 4),
    num_ahead=st.integers(0, 6),
    num_per_step=st.integers(1, 3),
    num_tokens=st.integers(1, 200),
    has_images=st.booleans(),
    shares_prefix=st.booleans(),
    short_of_memory_at=st.lists(st.integers(0, 60), max_size=4, unique=True),
)
def test_a_long_prompt_is_not_starved_by_short_ones(
    max_num_seqs: int,
    num_ahead: int,
    num_per_step: int,
    num_tokens: int,
    has_images: bool,
    shares_prefix: bool,
    short_of_memory_at: list[int],
) -> None:
    flood = Flood(
        make_scheduler(max_num_seqs, budget=20), num_per_step, shares_prefix=shares_prefix
    )
    for _ in range(num_ahead):
        flood.pour()
    ahead = flood.scheduler.waiting
    aged = sequence("aged", num_tokens, has_images=has_images, shares_prefix=shares_prefix)
    flood.scheduler.add(aged)
    last_step = bound(ahead, aged, len(short_of_memory_at))
    for step in range(last_step):
        flood.pour()
        flood.step(2 if step in short_of_memory_at else 20)
        if aged.state is SequenceState.FINISHED:
            return
    raise AssertionError(f"still {aged.state} after {last_step} steps")


@given(
    max_num_seqs=st.integers(1, 4),
    waves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    short_of_memory_at=st.lists(st.integers(0, 40), max_size=4, unique=True),
)
def test_those_that_go_first_overtake_only_others_and_all_end(
    max_num_seqs: int, waves: list[tuple[int, int]], short_of_memory_at: list[int]
) -> None:
    flood = Flood(make_scheduler(max_num_seqs, budget=20), 0, shares_prefix=False)
    scheduler, admitted = flood.scheduler, list[Sequence]()
    for step in range(1000):
        if step < len(waves):
            for goes_first, number in zip((False, True), waves[step], strict=True):
                for i in range(number):
                    seq = sequence(f"{goes_first}{step}.{i}", 18, goes_first=goes_first)
                    scheduler.add(seq)
        resumed = [seq for seq in scheduler.waiting if seq.request.goes_first]
        plan = flood.step(2 if step in short_of_memory_at else 20)
        admitted += plan.admitted
        if any(not seq.request.goes_first for seq in plan.admitted):
            assert set(resumed) <= set(plan.admitted)
        if step >= len(waves) and not scheduler.num_waiting and not scheduler.num_running:
            break
    assert len(set(admitted)) == sum(map(sum, waves))


@given(order=st.permutations(["long", "image", "short", "tiny"]), max_num_seqs=st.integers(1, 3))
def test_the_queue_is_admitted_in_order_of_arrival_whatever_it_holds(
    order: list[str], max_num_seqs: int
) -> None:
    lengths = {"long": 300, "image": 30, "short": 18, "tiny": 1}
    flood = Flood(make_scheduler(max_num_seqs, budget=20), 0, shares_prefix=True)
    for name in order:
        seq = sequence(name, lengths[name], has_images=name == "image", shares_prefix=True)
        flood.scheduler.add(seq)
    admitted: list[str] = []
    while len(admitted) < len(order):
        admitted += [seq.sequence_id for seq in flood.step(20).admitted]
    assert admitted == order
