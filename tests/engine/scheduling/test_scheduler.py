import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.scheduler import Scheduler, StepPlan
from deployments.engine.scheduling.sequence import (
    IllegalTransitionError,
    Sequence,
    SequenceEvent,
    SequenceRequest,
)
from deployments.plan.kv_layout import KVCopy, KVLayout

LENGTH = 1000


def sequence(
    name: str,
    num_tokens: int,
    *,
    has_images: bool = False,
    shares_prefix: bool = False,
    goes_first: bool = False,
    num_generated: int = 0,
    max_tokens: int | None = None,
) -> Sequence:
    """Return a sequence whose prompt has a first token of its own, or the shared one."""
    first = -1 if shares_prefix else 1000 + int.from_bytes(name.encode())
    request = SequenceRequest(
        name,
        (first, *range(num_tokens - 1)),
        SamplingParams(max_tokens=max_tokens),
        generated_token_ids=(0,) * num_generated,
        model_inputs={"pixel_values": torch.zeros(1)} if has_images else {},
        goes_first=goes_first,
    )
    return Sequence(request, max_model_len=LENGTH, eos_token_ids=frozenset())


def make_scheduler(
    max_num_seqs: int = 3, budget: int = 10, *, num_blocks: int = 1000, prefix_caching: bool = True
) -> Scheduler:
    """Return a scheduler whose KV memory has blocks of ten tokens."""
    return Scheduler(
        KVLayout((LENGTH,), (num_blocks,), block_size=10),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=budget,
        full_context_length=LENGTH,
        prefix_caching=prefix_caching,
    )


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


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.sequence.sequence_id, c.start, c.end) for c in plan.prefill]


def test_prompts_are_bounded_only_where_sequences_decode() -> None:
    scheduler = make_scheduler()
    scheduler.max_prompt_tokens = 3
    scheduler.add(sequence("a", 4))
    scheduler.add(sequence("b", 9))
    plan = scheduler.schedule()
    assert chunks(plan) == [("a", 0, 4), ("b", 0, 6)]
    complete(plan)
    plan = scheduler.schedule()
    assert len(plan.decode) == 1
    assert chunks(plan) == [("b", 6, 9)]
    complete(plan)
    scheduler.add(sequence("c", 5))
    assert chunks(scheduler.schedule()) == [("c", 0, 3)]


def test_the_oldest_is_admitted_first_and_long_prompts_are_cut_by_the_budget() -> None:
    scheduler = make_scheduler()
    for name, length in [("a", 4), ("b", 9), ("c", 2)]:
        scheduler.add(sequence(name, length))
    plan = scheduler.schedule()
    assert chunks(plan) == [("a", 0, 4), ("b", 0, 6)]
    complete(plan)
    plan = scheduler.schedule()
    assert [row.sequence.sequence_id for row in plan.decode] == ["a"]
    assert chunks(plan) == [("b", 6, 9), ("c", 0, 2)]


def test_no_more_sequences_run_than_are_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(sequence(name, 1))
    complete(scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.schedule().prefill == ()


def test_decoding_goes_first_and_prefill_takes_what_the_budget_leaves() -> None:
    scheduler = make_scheduler(max_num_seqs=3, budget=3)
    scheduler.add(sequence("a", 1))
    scheduler.add(sequence("b", 1))
    complete(scheduler.schedule())
    scheduler.add(sequence("c", 5))
    plan = scheduler.schedule()
    assert len(plan.decode) == 2
    assert chunks(plan) == [("c", 0, 1)]


def test_a_prompt_with_images_is_never_cut() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(sequence("text", 4))
    scheduler.add(sequence("image", 8, has_images=True))
    plan = scheduler.schedule()
    assert chunks(plan) == [("text", 0, 4)]
    complete(plan)
    assert chunks(scheduler.schedule()) == [("image", 0, 8)]


def test_a_resumed_prompt_with_images_is_prefilled_as_at_first_and_its_answer_in_chunks() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(sequence("image", 8, has_images=True, num_generated=15, goes_first=True))
    found = []
    for _ in range(4):
        plan = scheduler.schedule()
        found += [(c.start, c.end, c.has_images) for c in plan.prefill]
        complete(plan)
    assert found == [(0, 8, True), (8, 18, False), (18, 23, False)]


def test_those_that_go_first_wait_before_others_oldest_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, goes_first in [("a", False), ("R", True), ("b", False), ("S", True)]:
        scheduler.add(sequence(name, 2, goes_first=goes_first))
    assert [seq.sequence_id for seq in scheduler.waiting] == ["R", "S", "a", "b"]


def test_new_sequences_are_preempted_before_resumed_ones_and_wait_behind_them() -> None:
    scheduler = make_scheduler(max_num_seqs=4, budget=20)
    scheduler.add(sequence("R", 2, goes_first=True))
    for name in "ab":
        scheduler.add(sequence(name, 2))
    complete(scheduler.schedule())
    scheduler.add(sequence("S", 2, goes_first=True))
    complete(scheduler.schedule())
    scheduler.add(sequence("c", 2))
    scheduler.add(sequence("T", 2, goes_first=True))
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
    assert chunks(plan) == [("image", 0, 30)]
    complete(plan)
    assert chunks(scheduler.schedule()) == [("text", 0, 4)]


def test_removing_a_waiting_sequence_leaves_the_others_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = sequence("a", 1), sequence("b", 1)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.remove(waiting)
    assert (scheduler.running, scheduler.waiting) == ((running,), ())


def test_a_preempted_sequence_returns_to_its_place_in_the_queue_and_is_recomputed() -> None:
    scheduler = make_scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        scheduler.add(each)
    complete(scheduler.schedule())
    scheduler.preempt(a)
    scheduler.preempt(c)
    assert scheduler.waiting == (a, c, d)
    assert scheduler.running == (b,)
    assert chunks(scheduler.schedule()) == [("a", 0, 3), ("c", 0, 3)]


def test_a_waiting_sequence_cannot_be_preempted() -> None:
    scheduler = make_scheduler()
    waiting = sequence("a", 2)
    scheduler.add(waiting)
    with pytest.raises(IllegalTransitionError):
        scheduler.preempt(waiting)
    assert (scheduler.running, scheduler.waiting) == ((), (waiting,))


def test_a_smaller_step_has_the_newest_sequences_in_excess_whatever_their_places() -> None:
    scheduler = make_scheduler()
    a, b, c, d = (sequence(name, 2) for name in "abcd")
    for each in (a, b, c, d):
        scheduler.add(each)
    complete(scheduler.schedule())
    scheduler.remove(a)
    complete(scheduler.schedule())
    assert scheduler.running == (b, c, d)
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


def test_a_budget_of_less_than_a_token_for_each_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        make_scheduler(max_num_seqs=4, budget=3)


def names(plan: StepPlan) -> list[str]:
    return [seq.sequence_id for seq in plan.admitted]


def test_a_burst_with_a_common_prefix_computes_it_once() -> None:
    scheduler = make_scheduler(max_num_seqs=4, budget=60)
    for name in "abc":
        scheduler.add(sequence(name, 40, shares_prefix=True))
    first = scheduler.schedule()
    assert (names(first), chunks(first)) == (["a"], [("a", 0, 40)])
    complete(first)
    second = scheduler.schedule()
    assert names(second) == ["b", "c"]
    starts = [chunk.starts[0] for chunk in second.prefill]
    source = first.prefill[0].starts[0]
    assert second.copies == tuple(KVCopy(0, source, target, 39) for target in starts)
    assert chunks(second) == [("b", 39, 40), ("c", 39, 40)]
    assert [seq.num_cached_tokens for seq in second.admitted] == [39, 39]


def test_a_sequence_that_waits_for_a_prefix_starts_when_its_source_is_gone() -> None:
    scheduler = make_scheduler(max_num_seqs=4, budget=30)
    source = sequence("a", 90, shares_prefix=True)
    scheduler.add(source)
    scheduler.add(sequence("b", 80, shares_prefix=True))
    complete(scheduler.schedule())
    assert names(scheduler.schedule()) == []
    source.finish(FinishReason.ERROR)
    scheduler.remove(source)
    plan = scheduler.schedule()
    assert chunks(plan) == [("b", 0, 30)]


def test_a_sequence_with_a_prefix_from_a_decoding_one_does_not_wait_for_a_slightly_longer_one() -> (
    None
):
    scheduler = make_scheduler(max_num_seqs=4, budget=60)
    scheduler.add(sequence("a", 30, shares_prefix=True))
    complete(scheduler.schedule())
    scheduler.add(sequence("b", 40, shares_prefix=True))
    scheduler.add(sequence("c", 40, shares_prefix=True))
    plan = scheduler.schedule()
    # c shares only 10 more tokens with b than with a: too few to wait for.
    assert chunks(plan) == [("b", 30, 40), ("c", 30, 40)]


def test_without_prefix_caching_each_sequence_computes_its_own_prefix() -> None:
    scheduler = make_scheduler(budget=200, prefix_caching=False)
    for name in "abc":
        scheduler.add(sequence(name, 40, shares_prefix=True))
    plan = scheduler.schedule()
    assert chunks(plan) == [("a", 0, 40), ("b", 0, 40), ("c", 0, 40)]
    assert plan.copies == ()


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 25), st.booleans(), st.integers(0, 4)), min_size=1, max_size=12
    ),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(4, 12),
    lifetimes=st.lists(st.integers(1, 6), min_size=12, max_size=12),
)
def test_every_token_is_computed_once_in_order_and_within_the_budget(
    arrivals: list[tuple[int, bool, int]], max_num_seqs: int, budget: int, lifetimes: list[int]
) -> None:
    scheduler = make_scheduler(max_num_seqs, budget)
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
        starts = [row.starts for row in plan.decode]
        starts += [chunk.starts for chunk in plan.prefill]
        assert len(set(starts)) == len(starts) <= max_num_seqs
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


def running_names(scheduler: Scheduler) -> str:
    return "".join(seq.sequence_id for seq in scheduler.running)


def test_the_queue_waits_until_the_memory_has_room_for_its_first_sequence() -> None:
    scheduler = make_scheduler(max_num_seqs=9, budget=90, num_blocks=100)
    for name, max_tokens in [("a", 500), ("b", 400), ("c", 300), ("d", 10)]:
        scheduler.add(sequence(name, 5, max_tokens=max_tokens))
    complete(scheduler.schedule())
    # d would fit, but c came first.
    assert (running_names(scheduler), scheduler.num_waiting) == ("ab", 2)
    scheduler.remove(scheduler.running[1])
    complete(scheduler.schedule())
    assert running_names(scheduler) == "acd"


def test_sequences_of_unknown_length_grow_and_the_newest_wait_when_memory_is_full() -> None:
    scheduler = make_scheduler(max_num_seqs=9, budget=90, num_blocks=100)
    sequences = [sequence(name, 248) for name in "abcd"]
    for each in sequences:
        scheduler.add(each)
    preempted = ""
    for _ in range(200):
        plan = scheduler.schedule()
        preempted += "".join(seq.sequence_id for seq in plan.preempted)
        complete(plan)
    assert preempted == "c"
    assert running_names(scheduler) == "ab"
    assert [seq.sequence_id for seq in scheduler.waiting] == ["c", "d"]
    for each in sequences[:2]:
        scheduler.remove(each)
    plan = scheduler.schedule()
    assert [seq.sequence_id for seq in plan.admitted] == ["c"]
