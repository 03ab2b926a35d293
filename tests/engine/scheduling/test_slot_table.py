from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.output import FinishReason
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduling.scheduler import Scheduler, StepPlan
from deployments.engine.scheduling.sequence import (
    Sequence,
    SequenceEvent,
    SequenceRequest,
    SequenceState,
)
from deployments.engine.scheduling.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe
from deployments.engine.scheduling.slot_table import (
    MIN_REUSED_TOKENS,
    Prefix,
    SlotTable,
    num_shared_tokens,
)
from tests.engine.naive_slots import NaiveSlots

LENGTH = 120


def sequence(
    name: str, token_ids: Iterable[int], *, has_images: bool = False, max_tokens: int = 50
) -> Sequence:
    request = SequenceRequest(
        name,
        tuple(token_ids),
        SamplingParams(max_tokens=max_tokens),
        model_inputs={"pixel_values": torch.zeros(1)} if has_images else {},
    )
    return Sequence(request, max_model_len=LENGTH, eos_token_ids=frozenset())


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_shared_tokens_are_counted_to_the_first_that_differs(
    first: list[int], second: list[int]
) -> None:
    limit = min(len(first), len(second))
    expected = next((i for i in range(limit) if first[i] != second[i]), limit)
    assert num_shared_tokens(first, second, limit) == expected
    # A bisection could go wrong inside long runs of equal tokens.
    long_first, long_second = [7] * 100 + first, [7] * 100 + second
    assert num_shared_tokens(long_first, long_second, 100 + limit) == 100 + expected


def table(
    num_slots: int = 3, *, full_context_length: int = LENGTH, retains: bool = True
) -> SlotTable:
    return SlotTable(num_slots=num_slots, full_context_length=full_context_length, retains=retains)


def run(slots: SlotTable, seq: Sequence) -> list[SlotEdit]:
    """Admit a sequence with the prefix found for it, and compute all its tokens."""
    prefix = slots.find_prefix(seq)
    seq.admit(num_cached_tokens=prefix.num_tokens if prefix else 0)
    edits = slots.admit(seq, prefix)
    seq.num_computed_tokens = len(seq.token_ids)
    seq.handle(SequenceEvent.PREFILLED)
    return edits


def end(slots: SlotTable, seq: Sequence, reason: FinishReason) -> list[SlotEdit]:
    seq.finish(reason)
    return slots.remove(seq)


def retain(slots: SlotTable, *prompts: Iterable[int]) -> None:
    """Run sequences together, then end them in order; the first is left in the last slot."""
    sequences = [sequence("r", prompt) for prompt in prompts]
    for seq in sequences:
        run(slots, seq)
    for seq in sequences:
        end(slots, seq, FinishReason.STOP)


def test_a_running_sequence_donates_what_it_has_computed_and_keeps_it() -> None:
    slots = table()
    donor = sequence("donor", range(40))
    run(slots, donor)
    taker = sequence("taker", [*range(30), 99])
    assert run(slots, taker) == [SlotCopy(source=0, target=1, length=30)]
    assert taker.num_cached_tokens == 30


def test_a_retained_slot_that_is_used_up_is_taken_in_place() -> None:
    slots = table()
    retain(slots, range(40))
    assert run(slots, sequence("turn 2", range(60))) == []
    assert slots.find_prefix(sequence("turn 3", range(70))) == Prefix(0, 60)


def test_a_retained_slot_of_which_little_would_be_left_is_taken_and_trimmed() -> None:
    slots = table()
    retain(slots, range(40))
    assert run(slots, sequence("again", [*range(30), 99])) == [SlotWipe(0, 30, 40)]


def test_a_retained_slot_of_which_much_is_left_stays_for_others() -> None:
    slots = table()
    retain(slots, range(60))
    edits = run(slots, sequence("another", [*range(30), 99]))
    # The new sequence must get the first free slot, so that slot's contents are swapped away.
    assert edits == [SlotSwap(0, 1, 60), SlotCopy(1, 0, 30)]
    assert slots.find_prefix(sequence("first again", range(60))) == Prefix(1, 59)


def test_the_last_free_slot_is_taken_even_if_it_is_the_donor() -> None:
    slots = table(num_slots=1)
    retain(slots, range(60))
    assert run(slots, sequence("another", [*range(30), 99])) == [SlotWipe(0, 30, 60)]


def test_the_least_recently_used_slot_is_evicted() -> None:
    slots = table(num_slots=2)
    retain(slots, range(100, 150), range(200, 250))
    run(slots, taker := sequence("t", [*range(100, 120), 99]))  # uses the first, evicts the second
    end(slots, taker, FinishReason.ERROR)
    assert slots.find_prefix(sequence("a", range(100, 150))) is not None
    assert slots.find_prefix(sequence("b", range(200, 250))) is None


def test_a_clean_slot_is_taken_before_a_retained_one() -> None:
    slots = table(num_slots=3)
    retain(slots, range(100, 150), range(200, 250))
    run(slots, sequence("other", range(300, 340)))
    assert slots.find_prefix(sequence("a", range(100, 150))) is not None
    assert slots.find_prefix(sequence("b", range(200, 250))) is not None


def test_one_token_is_always_left_to_compute() -> None:
    slots = table()
    retain(slots, range(40))
    assert slots.find_prefix(sequence("same", range(40))) == Prefix(0, 39)


@pytest.mark.parametrize(("num_shared", "is_found"), [(15, False), (16, True)])
def test_short_prefixes_are_not_reused(num_shared: int, is_found: bool) -> None:
    slots = table()
    retain(slots, range(40))
    assert num_shared in (MIN_REUSED_TOKENS - 1, MIN_REUSED_TOKENS)
    found = slots.find_prefix(sequence("s", [*range(num_shared), 99, 98]))
    assert (found is not None) is is_found


def test_the_slot_of_a_failed_sequence_is_wiped_and_never_donated() -> None:
    slots = table()
    run(slots, failed := sequence("failed", range(40)))
    assert end(slots, failed, FinishReason.ERROR) == [SlotWipe(0, 0, 40)]
    assert slots.find_prefix(sequence("s", range(40))) is None


def test_a_sequence_in_a_failed_pass_donates_and_retains_nothing_until_it_has_run_again() -> None:
    slots = table()
    run(slots, failed := sequence("failed", range(40)))
    failed.has_uncounted_kv = True
    assert slots.find_prefix(sequence("s", range(40))) is None
    failed.has_uncounted_kv = False
    assert slots.find_prefix(sequence("s", range(40))) == Prefix(0, 39)
    failed.has_uncounted_kv = True
    assert end(slots, failed, FinishReason.ABORT) == [SlotWipe(0, 0, 40)]


def test_a_prefix_that_has_not_led_to_logits_is_not_donated() -> None:
    slots = table()
    prefilling = sequence("prefilling", range(40))
    prefilling.admit()
    slots.admit(prefilling, None)
    prefilling.num_computed_tokens = 39
    late = sequence("late", range(60))
    assert slots.find_prefix(late) is None
    assert slots.is_prefix_pending(late, None)
    assert end(slots, prefilling, FinishReason.ABORT) == [SlotWipe(0, 0, 40)]
    assert not slots.is_prefix_pending(late, None)


@pytest.mark.parametrize(("num_shared", "is_pending"), [(45, False), (46, True)])
def test_a_pending_prefix_must_be_long_enough_to_be_worth_a_wait(
    num_shared: int, is_pending: bool
) -> None:
    slots = table()
    retain(slots, range(30))
    prefilling = sequence("prefilling", [*range(num_shared), *[99] * 9])
    prefilling.admit()
    slots.admit(prefilling, None)
    late = sequence("late", range(60))
    found = slots.find_prefix(late)
    assert found == Prefix(1, 30)
    assert slots.is_prefix_pending(late, found) is is_pending


def test_only_a_sequence_that_needs_all_of_a_ring_waits_for_it() -> None:
    slots = table(full_context_length=32)
    prefilling = sequence("prefilling", range(40))
    prefilling.admit()
    slots.admit(prefilling, None)
    assert slots.is_prefix_pending(sequence("the same", range(40)), None)
    assert slots.is_prefix_pending(sequence("longer", range(60)), None)
    assert not slots.is_prefix_pending(sequence("another", [*range(38), 99, 98]), None)


def test_a_wrapped_ring_donates_all_or_all_but_its_newest_token() -> None:
    slots = table(full_context_length=32)
    retain(slots, range(40))
    assert slots.find_prefix(sequence("longer", range(60))) == Prefix(0, 40)
    assert slots.find_prefix(sequence("the same", range(40))) == Prefix(0, 39)
    assert slots.find_prefix(sequence("shorter", range(39))) is None
    assert slots.find_prefix(sequence("another", [*range(30), 99])) is None


def test_a_ring_that_has_not_wrapped_donates_any_prefix() -> None:
    slots = table(full_context_length=40)
    retain(slots, range(40))
    assert slots.find_prefix(sequence("another", [*range(30), 99])) == Prefix(0, 30)


def test_sequences_with_images_neither_donate_nor_reuse() -> None:
    slots = table()
    run(slots, pictured := sequence("image", range(40), has_images=True))
    assert slots.find_prefix(sequence("text", range(40))) is None
    assert end(slots, pictured, FinishReason.STOP) == [SlotWipe(0, 0, 40)]
    retain(slots, range(40))
    assert slots.find_prefix(sequence("image 2", range(40), has_images=True)) is None


def test_without_retention_nothing_is_reused() -> None:
    slots = table(retains=False)
    donor = sequence("donor", range(40))
    run(slots, donor)
    assert slots.find_prefix(sequence("same", range(40))) is None
    assert not slots.is_prefix_pending(sequence("same", range(40)), None)
    assert end(slots, donor, FinishReason.STOP) == [SlotWipe(0, 0, 40)]
    assert run(slots, sequence("same", range(40))) == []


class Simulation:
    """A scheduler driven as by the engine, with naive slots for comparison."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.num_slots = random.randint(1, 4)
        self.budget = self.num_slots + random.choice([0, 3, 20, 200])
        ring = random.choice([LENGTH, 20, 45])
        self.prefix_caching = random.random() < 0.9
        self.scheduler = Scheduler(
            max_num_seqs=self.num_slots,
            max_batched_tokens=self.budget,
            full_context_length=ring,
            prefix_caching=self.prefix_caching,
        )
        self.slots = NaiveSlots(num_slots=self.num_slots, length=LENGTH, capacity=ring)
        self.alive: list[Sequence] = []
        self.expected_order: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.known: list[list[int]] = []

    def arrive(self) -> None:
        """Add a sequence that begins with an earlier one's prefix or with a system prompt."""
        random = self.random
        prompt = [random.choice([1, 2])] * random.choice([2, 18, 30])
        if self.known and random.random() < 0.7:
            earlier = random.choice(self.known)
            prompt = earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])]
        prompt = prompt[:80] + [random.randint(3, 4) for _ in range(random.choice([0, 1, 12]))]
        self.known.append(prompt)
        name = str(len(self.known))
        made = sequence(name, prompt, has_images=random.random() < 0.1, max_tokens=6)
        self.scheduler.add(made)
        self.alive.append(made)
        self.expected_order.append(made)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        is_waiting = seq.state is SequenceState.WAITING
        seq.finish(reason)
        self.slots.apply(self.scheduler.remove(seq))
        self.alive.remove(seq)
        if is_waiting:
            self.expected_order.remove(seq)
        self.known.append(list(seq.token_ids))

    def step(self) -> None:
        before = {id(seq): seq.num_computed_tokens for seq in self.alive}
        waiting = [seq for seq in self.alive if seq.state is SequenceState.WAITING]
        prefilling = [seq for seq in self.alive if seq.state is SequenceState.PREFILLING]
        donors = set(range(self.num_slots)) - {self.scheduler.slot_of(seq) for seq in prefilling}
        promised = [self.slots.longest_prefix(seq.token_ids, donors) for seq in waiting[:1]]
        plan = self.scheduler.schedule()
        self.slots.apply(plan.edits)
        self.admitted += plan.admitted
        if plan.admitted:
            first = plan.admitted[0]
            is_sharing = self.prefix_caching and first.can_chunk_prefill
            assert first.num_computed_tokens == (promised[0] if is_sharing else 0)
        assert plan.num_tokens > 0
        is_lone_image = len(plan.prefill) == 1 and not plan.prefill[0].sequence.can_chunk_prefill
        assert plan.num_tokens <= self.budget or is_lone_image
        self.check(plan)
        self.complete(plan)
        assert any(seq.num_computed_tokens > before[id(seq)] for seq in self.alive)
        for seq in list(self.alive):
            if len(seq.token_ids) >= seq.max_num_tokens:
                self.finish(seq, FinishReason.LENGTH)

    def check(self, plan: StepPlan) -> None:
        running = [seq for seq in self.alive if seq.state is not SequenceState.WAITING]
        slots = [self.scheduler.slot_of(seq) for seq in running]
        assert sorted(slot for slot in slots if slot is not None) == list(range(len(running)))
        for seq, slot in zip(running, slots, strict=True):
            assert slot is not None
            computed = seq.token_ids[: seq.num_computed_tokens]
            if seq.can_chunk_prefill:
                assert self.slots.gives(slot, computed)
            assert self.slots.is_clean_after(slot, len(computed))
        places = [(row.sequence, row.slot) for row in plan.decode]
        places += [(chunk.sequence, chunk.slot) for chunk in plan.prefill]
        assert all(self.scheduler.slot_of(seq) == slot for seq, slot in places)

    def complete(self, plan: StepPlan) -> None:
        chunks = [(c.sequence, c.slot, c.start, c.end) for c in plan.prefill]
        chunks += [
            (r.sequence, r.slot, r.sequence.num_computed_tokens, len(r.sequence.token_ids))
            for r in plan.decode
        ]
        for seq, slot, start, end in chunks:
            assert start == seq.num_computed_tokens
            for position in range(start, end):
                token: object = seq.token_ids[position]
                self.slots.write(
                    slot, position, token if seq.can_chunk_prefill else f"image {token}"
                )
            seq.num_computed_tokens = end
            if end == len(seq.token_ids):
                if seq.state is SequenceState.PREFILLING:
                    seq.handle(SequenceEvent.PREFILLED)
                seq.append(self.random.randint(3, 4))


@pytest.mark.slow
@settings(max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_every_slot_holds_what_its_sequence_needs_whatever_comes_and_goes(seed: int) -> None:
    random = Random(seed)
    simulation = Simulation(random)
    for _ in range(random.randint(1, 40)):
        for _ in range(random.choice([0, 0, 1, 3])):
            simulation.arrive()
        if simulation.alive and random.random() < 0.2:
            reason = random.choice([FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR])
            simulation.finish(random.choice(simulation.alive), reason)
        if simulation.alive:
            simulation.step()
    while simulation.alive:
        simulation.step()
    assert simulation.admitted == simulation.expected_order
