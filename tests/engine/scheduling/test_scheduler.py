import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.output import FinishReason
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduling.scheduler import Scheduler, StepPlan
from deployments.engine.scheduling.sequence import (
    IllegalTransitionError,
    Sequence,
    SequenceEvent,
    SequenceRequest,
)
from deployments.engine.scheduling.slot_edits import SlotCopy, SlotSwap, SlotWipe

LENGTH = 1000


def sequence(
    name: str,
    num_tokens: int,
    *,
    has_images: bool = False,
    shares_prefix: bool = False,
    is_resumed: bool = False,
    num_generated: int = 0,
) -> Sequence:
    """Return a sequence whose prompt has a first token of its own, or the shared one."""
    first = -1 if shares_prefix else 1000 + int.from_bytes(name.encode())
    request = SequenceRequest(
        name,
        (first, *range(num_tokens - 1)),
        SamplingParams(),
        generated_token_ids=(0,) * num_generated,
        model_inputs={"pixel_values": torch.zeros(1)} if has_images else {},
        is_resumed=is_resumed,
    )
    return Sequence(request, max_model_len=LENGTH, eos_token_ids=frozenset())


def make_scheduler(num_slots: int = 3, budget: int = 10) -> Scheduler:
    return Scheduler(max_num_seqs=num_slots, max_batched_tokens=budget, full_context_length=LENGTH)


def complete(plan: StepPlan) -> None:
    """Update the sequences as the engine does after a step, with a token for each that is due."""
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
    scheduler = make_scheduler()
    for name, length in [("a", 4), ("b", 9), ("c", 2)]:
        scheduler.add(sequence(name, length))
    plan = scheduler.schedule()
    assert chunks(plan) == [("a", 0, 0, 4), ("b", 1, 0, 6)]
    complete(plan)
    plan = scheduler.schedule()
    assert [row.sequence.sequence_id for row in plan.decode] == ["a"]
    assert chunks(plan) == [("b", 1, 6, 9), ("c", 2, 0, 2)]


def test_no_more_sequences_are_admitted_than_slots() -> None:
    scheduler = make_scheduler(num_slots=2)
    for name in "abc":
        scheduler.add(sequence(name, 1))
    complete(scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.schedule().prefill == ()


def test_decoding_goes_first_and_prefill_takes_what_the_budget_leaves() -> None:
    scheduler = make_scheduler(num_slots=3, budget=3)
    scheduler.add(sequence("a", 1))
    scheduler.add(sequence("b", 1))
    complete(scheduler.schedule())
    scheduler.add(sequence("c", 5))
    plan = scheduler.schedule()
    assert len(plan.decode) == 2
    assert chunks(plan) == [("c", 2, 0, 1)]


def test_a_prompt_with_images_is_never_cut() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(sequence("text", 4))
    scheduler.add(sequence("image", 8, has_images=True))
    plan = scheduler.schedule()
    assert chunks(plan) == [("text", 0, 0, 4)]
    complete(plan)
    assert chunks(scheduler.schedule()) == [("image", 1, 0, 8)]


def test_a_resumed_prompt_with_images_is_prefilled_as_at_first_and_its_answer_in_chunks() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(sequence("image", 8, has_images=True, num_generated=15, is_resumed=True))
    found = []
    for _ in range(4):
        plan = scheduler.schedule()
        found += [(c.start, c.end, c.has_images) for c in plan.prefill]
        complete(plan)
    assert found == [(0, 8, True), (8, 18, False), (18, 23, False)]


def test_resumed_sequences_wait_before_new_ones_oldest_first() -> None:
    scheduler = make_scheduler(num_slots=1)
    for name, is_resumed in [("a", False), ("R", True), ("b", False), ("S", True)]:
        scheduler.add(sequence(name, 2, is_resumed=is_resumed))
    assert [seq.sequence_id for seq in scheduler.waiting] == ["R", "S", "a", "b"]


def test_new_sequences_are_preempted_before_resumed_ones_and_wait_behind_them() -> None:
    scheduler = make_scheduler(num_slots=4, budget=20)
    scheduler.add(sequence("R", 2, is_resumed=True))
    for name in "ab":
        scheduler.add(sequence(name, 2))
    complete(scheduler.schedule())
    scheduler.add(sequence("S", 2, is_resumed=True))
    complete(scheduler.schedule())
    scheduler.add(sequence("c", 2))
    scheduler.add(sequence("T", 2, is_resumed=True))
    scheduler.max_step_tokens = 1
    excess = scheduler.excess
    assert [seq.sequence_id for seq in excess] == ["b", "a", "S"]
    for seq in excess:
        scheduler.preempt(seq)
    assert [seq.sequence_id for seq in scheduler.waiting] == ["S", "T", "a", "b", "c"]


def test_a_prompt_with_images_beyond_the_budget_runs_alone() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(sequence("image", 30, has_images=True))
    scheduler.add(sequence("text", 4))
    plan = scheduler.schedule()
    assert chunks(plan) == [("image", 0, 0, 30)]
    complete(plan)
    assert chunks(scheduler.schedule()) == [("text", 1, 0, 4)]


def test_the_last_sequence_takes_the_slot_of_one_that_leaves() -> None:
    scheduler = make_scheduler()
    a, b, c = (sequence(name, 2) for name in "abc")
    for each in (a, b, c):
        scheduler.add(each)
    complete(scheduler.schedule())
    a.finish(FinishReason.ERROR)
    assert scheduler.remove(a) == (SlotSwap(first=0, second=2, length=3), SlotWipe(2, 0, 3))
    assert [scheduler.slot_of(each) for each in (a, b, c)] == [None, 1, 0]
    b.finish(FinishReason.ERROR)
    assert scheduler.remove(b) == (SlotWipe(1, 0, 3),)


def test_removing_a_waiting_sequence_leaves_the_slots_alone() -> None:
    scheduler = make_scheduler(num_slots=1)
    running, waiting = sequence("a", 1), sequence("b", 1)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    assert scheduler.remove(waiting) == ()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    assert scheduler.slot_of(running) == 0


def test_a_preempted_sequence_returns_to_its_place_in_the_queue_and_is_recomputed() -> None:
    scheduler = make_scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        scheduler.add(each)
    complete(scheduler.schedule())
    assert scheduler.preempt(a) == (SlotSwap(0, 2, 3), SlotWipe(2, 0, 3))
    assert scheduler.preempt(c) == (SlotSwap(0, 1, 3), SlotWipe(1, 0, 3))
    assert scheduler.waiting == (a, c, d)
    assert scheduler.running == (b,)
    assert chunks(scheduler.schedule()) == [("a", 1, 0, 3), ("c", 2, 0, 3)]


def test_a_waiting_sequence_cannot_be_preempted() -> None:
    scheduler = make_scheduler()
    waiting = sequence("a", 2)
    scheduler.add(waiting)
    with pytest.raises(IllegalTransitionError):
        scheduler.preempt(waiting)
    assert (scheduler.running, scheduler.waiting) == ((), (waiting,))


def test_a_smaller_step_has_the_newest_sequences_in_excess_whatever_their_slots() -> None:
    scheduler = make_scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        scheduler.add(each)
    complete(scheduler.schedule())
    scheduler.remove(a)
    complete(scheduler.schedule())
    assert scheduler.running == (c, b, d)
    assert scheduler.excess == []
    scheduler.max_step_tokens = 1
    assert scheduler.excess == [d, c]
    for each in scheduler.excess:
        scheduler.preempt(each)
    assert scheduler.schedule().num_tokens == 1
    assert scheduler.waiting == (c, d)


def test_an_unknown_sequence_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="not in"):
        make_scheduler().remove(sequence("a", 1))


def test_a_budget_below_the_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        make_scheduler(num_slots=4, budget=3)


def names(plan: StepPlan) -> list[str]:
    return [seq.sequence_id for seq in plan.admitted]


def test_a_burst_with_a_common_prefix_computes_it_once() -> None:
    scheduler = make_scheduler(num_slots=4, budget=60)
    for name in "abc":
        scheduler.add(sequence(name, 40, shares_prefix=True))
    first = scheduler.schedule()
    assert (names(first), chunks(first)) == (["a"], [("a", 0, 0, 40)])
    complete(first)
    second = scheduler.schedule()
    assert names(second) == ["b", "c"]
    assert second.edits == (SlotCopy(0, 1, 39), SlotCopy(0, 2, 39))
    assert chunks(second) == [("b", 1, 39, 40), ("c", 2, 39, 40)]
    assert [seq.num_cached_tokens for seq in second.admitted] == [39, 39]


def test_a_sequence_that_waits_for_a_prefix_starts_when_its_source_is_gone() -> None:
    scheduler = make_scheduler(num_slots=4, budget=30)
    source = sequence("a", 90, shares_prefix=True)
    scheduler.add(source)
    scheduler.add(sequence("b", 80, shares_prefix=True))
    complete(scheduler.schedule())
    assert names(scheduler.schedule()) == []
    source.finish(FinishReason.ERROR)
    scheduler.remove(source)
    plan = scheduler.schedule()
    assert chunks(plan) == [("b", 0, 0, 30)]


def test_a_sequence_with_a_prefix_from_a_decoding_one_does_not_wait_for_a_slightly_longer_one() -> (
    None
):
    scheduler = make_scheduler(num_slots=4, budget=60)
    scheduler.add(sequence("a", 30, shares_prefix=True))
    complete(scheduler.schedule())
    scheduler.add(sequence("b", 40, shares_prefix=True))
    scheduler.add(sequence("c", 40, shares_prefix=True))
    plan = scheduler.schedule()
    # c shares only 10 more tokens with b than with a: too few to wait for.
    assert chunks(plan) == [("b", 1, 30, 40), ("c", 2, 30, 40)]


def test_without_prefix_caching_each_sequence_computes_its_own_prefix() -> None:
    scheduler = Scheduler(
        max_num_seqs=3, max_batched_tokens=200, full_context_length=LENGTH, prefix_caching=False
    )
    for name in "abc":
        scheduler.add(sequence(name, 40, shares_prefix=True))
    plan = scheduler.schedule()
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
    scheduler = make_scheduler(num_slots, budget)
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
            scheduler.add(item[1])
            alive.append(item[1])
        plan = scheduler.schedule()
        slots = [row.slot for row in plan.decode] + [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots)
        assert all(slot < num_slots for slot in slots)
        is_lone_image = len(plan.prefill) == 1 and not plan.prefill[0].sequence.can_chunk_prefill
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
                scheduler.remove(seq)
        if not pending and not scheduler.num_running and not scheduler.num_waiting:
            break
    assert sorted(admitted) == list(range(len(arrivals)))
