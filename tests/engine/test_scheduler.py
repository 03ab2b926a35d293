import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.output import FinishReason
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduler import Scheduler, StepPlan
from deployments.engine.sequence import (
    IllegalTransitionError,
    Sequence,
    SequenceEvent,
    SequenceRequest,
)
from deployments.engine.slot_edits import SlotCopy, SlotSwap, SlotWipe

LENGTH = 1000


def sequence(
    name: str, num_tokens: int, *, has_images: bool = False, shares: bool = False
) -> Sequence:
    """Return a sequence whose prompt begins as no other's, unless it shares the common one."""
    first = -1 if shares else 1000 + int.from_bytes(name.encode())
    request = SequenceRequest(
        name,
        (first, *range(num_tokens - 1)),
        SamplingParams(),
        model_inputs={"pixel_values": torch.zeros(1)} if has_images else {},
    )
    return Sequence(request, max_model_len=LENGTH, eos_token_ids=frozenset())


def scheduler(num_slots: int = 3, budget: int = 10) -> Scheduler:
    return Scheduler(max_num_seqs=num_slots, max_batched_tokens=budget, unwrapped_length=LENGTH)


def complete(plan: StepPlan) -> None:
    """Do what the engine does to sequences after a step, with a token for each that is due."""
    for row in plan.decode:
        row.sequence.num_computed_tokens += 1
        row.sequence.append(0)
    for chunk in plan.prefill:
        chunk.sequence.num_computed_tokens = chunk.end
        if chunk.end == len(chunk.sequence.token_ids):
            chunk.sequence.handle(SequenceEvent.PREFILLED)
            chunk.sequence.append(0)


def chunks(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(c.sequence.sequence_id, c.slot, c.start, c.end) for c in plan.prefill]


def test_the_oldest_is_admitted_first_and_long_prompts_are_cut_by_the_budget() -> None:
    line = scheduler()
    for name, length in [("a", 4), ("b", 9), ("c", 2)]:
        line.add(sequence(name, length))
    plan = line.schedule()
    assert chunks(plan) == [("a", 0, 0, 4), ("b", 1, 0, 6)]
    complete(plan)
    plan = line.schedule()
    assert [row.sequence.sequence_id for row in plan.decode] == ["a"]
    assert chunks(plan) == [("b", 1, 6, 9), ("c", 2, 0, 2)]


def test_nobody_is_admitted_beyond_the_slots() -> None:
    line = scheduler(num_slots=2)
    for name in "abc":
        line.add(sequence(name, 1))
    complete(line.schedule())
    assert (line.num_running, line.num_waiting) == (2, 1)
    assert line.schedule().prefill == ()


def test_decoding_goes_first_and_prefill_takes_what_the_budget_leaves() -> None:
    line = scheduler(num_slots=3, budget=3)
    line.add(sequence("a", 1))
    line.add(sequence("b", 1))
    complete(line.schedule())
    line.add(sequence("c", 5))
    plan = line.schedule()
    assert len(plan.decode) == 2
    assert chunks(plan) == [("c", 2, 0, 1)]


def test_a_prompt_with_images_is_never_cut() -> None:
    line = scheduler(budget=10)
    line.add(sequence("text", 4))
    line.add(sequence("image", 8, has_images=True))
    plan = line.schedule()
    assert chunks(plan) == [("text", 0, 0, 4)]
    complete(plan)
    assert chunks(line.schedule()) == [("image", 1, 0, 8)]


def test_a_prompt_with_images_beyond_the_budget_runs_alone() -> None:
    line = scheduler(budget=10)
    line.add(sequence("image", 30, has_images=True))
    line.add(sequence("text", 4))
    plan = line.schedule()
    assert chunks(plan) == [("image", 0, 0, 30)]
    complete(plan)
    assert chunks(line.schedule()) == [("text", 1, 0, 4)]


def test_the_last_takes_the_place_of_one_that_leaves() -> None:
    line = scheduler()
    a, b, c = (sequence(name, 2) for name in "abc")
    for each in (a, b, c):
        line.add(each)
    complete(line.schedule())
    a.finish(FinishReason.ERROR)
    assert line.remove(a) == (SlotSwap(first=0, second=2, length=3), SlotWipe(2, 0, 3))
    assert [line.slot_of(each) for each in (a, b, c)] == [None, 1, 0]
    b.finish(FinishReason.ERROR)
    assert line.remove(b) == (SlotWipe(1, 0, 3),)


def test_one_that_waits_leaves_the_slots_alone() -> None:
    line = scheduler(num_slots=1)
    running, waiting = sequence("a", 1), sequence("b", 1)
    line.add(running)
    line.add(waiting)
    line.schedule()
    assert line.remove(waiting) == ()
    assert (line.num_running, line.num_waiting) == (1, 0)
    assert line.slot_of(running) == 0


def test_a_preempted_sequence_waits_at_its_place_and_is_computed_anew() -> None:
    line = scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        line.add(each)
    complete(line.schedule())
    assert line.preempt(a) == (SlotSwap(0, 2, 3), SlotWipe(2, 0, 3))
    assert line.preempt(c) == (SlotSwap(0, 1, 3), SlotWipe(1, 0, 3))
    assert line.waiting == (a, c, d)
    assert line.running == (b,)
    assert chunks(line.schedule()) == [("a", 1, 0, 3), ("c", 2, 0, 3)]


def test_who_waits_cannot_be_preempted() -> None:
    line = scheduler()
    waiting = sequence("a", 2)
    line.add(waiting)
    with pytest.raises(IllegalTransitionError):
        line.preempt(waiting)
    assert (line.running, line.waiting) == ((), (waiting,))


def test_a_smaller_step_has_the_newest_in_excess_whatever_their_slots() -> None:
    line = scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        line.add(each)
    complete(line.schedule())
    line.remove(a)
    complete(line.schedule())
    assert line.running == (c, b, d)
    assert line.excess == []
    line.max_step_tokens = 1
    assert line.excess == [d, c]
    for each in line.excess:
        line.preempt(each)
    assert line.schedule().num_tokens == 1
    assert line.waiting == (c, d)


def test_a_stranger_cannot_leave() -> None:
    with pytest.raises(ValueError, match="not in"):
        scheduler().remove(sequence("a", 1))


def test_a_budget_below_the_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        scheduler(num_slots=4, budget=3)


def names(plan: StepPlan) -> list[str]:
    return [seq.sequence_id for seq in plan.admitted]


def test_a_burst_that_begins_alike_computes_its_beginning_once() -> None:
    line = scheduler(num_slots=4, budget=60)
    for name in "abc":
        line.add(sequence(name, 40, shares=True))
    first = line.schedule()
    assert (names(first), chunks(first)) == (["a"], [("a", 0, 0, 40)])
    complete(first)
    second = line.schedule()
    assert names(second) == ["b", "c"]
    assert second.edits == (SlotCopy(0, 1, 39), SlotCopy(0, 2, 39))
    assert chunks(second) == [("b", 1, 39, 40), ("c", 2, 39, 40)]
    assert [seq.num_cached_tokens for seq in second.admitted] == [39, 39]


def test_whoever_waits_for_a_prefix_goes_on_when_its_source_is_gone() -> None:
    line = scheduler(num_slots=4, budget=30)
    source = sequence("a", 90, shares=True)
    line.add(source)
    line.add(sequence("b", 80, shares=True))
    complete(line.schedule())
    assert names(line.schedule()) == []
    source.finish(FinishReason.ERROR)
    line.remove(source)
    plan = line.schedule()
    assert chunks(plan) == [("b", 0, 0, 30)]


def test_whoever_finds_a_prefix_among_those_that_decode_does_not_wait_for_the_next() -> None:
    line = scheduler(num_slots=4, budget=60)
    line.add(sequence("a", 30, shares=True))
    complete(line.schedule())
    line.add(sequence("b", 40, shares=True))
    line.add(sequence("c", 40, shares=True))
    plan = line.schedule()
    # b has 10 tokens more in common with c than a has: too few to wait for.
    assert chunks(plan) == [("b", 1, 30, 40), ("c", 2, 30, 40)]


def test_without_prefix_caching_all_compute_their_own() -> None:
    line = Scheduler(
        max_num_seqs=3, max_batched_tokens=200, unwrapped_length=LENGTH, prefix_caching=False
    )
    for name in "abc":
        line.add(sequence(name, 40, shares=True))
    plan = line.schedule()
    assert chunks(plan) == [("a", 0, 0, 40), ("b", 1, 0, 40), ("c", 2, 0, 40)]
    assert plan.edits == ()


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 25), st.booleans(), st.integers(0, 4)), min_size=1, max_size=12
    ),
    num_slots=st.integers(1, 4),
    budget=st.integers(4, 12),
    lifetimes=st.lists(st.integers(1, 6), min_size=12, max_size=12),
)
def test_every_token_is_computed_once_in_order_and_within_the_budget(
    arrivals: list[tuple[int, bool, int]], num_slots: int, budget: int, lifetimes: list[int]
) -> None:
    line = scheduler(num_slots, budget)
    pending = [
        (step, sequence(str(i), length, has_images=images), lifetimes[i])
        for i, (length, images, step) in enumerate(arrivals)
    ]
    lifetime = {seq.sequence_id: life for _, seq, life in pending}
    admitted: list[int] = []
    alive: list[Sequence] = []
    for now in range(400):
        for item in [item for item in pending if item[0] <= now]:
            pending.remove(item)
            line.add(item[1])
            alive.append(item[1])
        plan = line.schedule()
        slots = [row.slot for row in plan.decode] + [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots)
        assert all(slot < num_slots for slot in slots)
        is_lone_image = len(plan.prefill) == 1 and not plan.prefill[0].sequence.is_divisible
        assert plan.num_tokens <= budget or is_lone_image
        for chunk in plan.prefill:
            assert chunk.start == chunk.sequence.num_computed_tokens
            if chunk.start == 0:
                admitted.append(int(chunk.sequence.sequence_id))
        complete(plan)
        for seq in list(alive):
            if len(seq.token_ids) >= seq.num_prompt_tokens + lifetime[seq.sequence_id]:
                seq.finish(FinishReason.LENGTH)
                alive.remove(seq)
                line.remove(seq)
        if not pending and not line.num_running and not line.num_waiting:
            break
    assert sorted(admitted) == list(range(len(arrivals)))
