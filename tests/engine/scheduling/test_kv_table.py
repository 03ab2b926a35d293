from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.kv_table import KVTable
from deployments.engine.scheduling.prefixes import MIN_REUSED_TOKENS, Holder, num_stored_tokens
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, Scheduler, StepPlan
from deployments.engine.scheduling.sequence import (
    Sequence,
    SequenceEvent,
    SequenceRequest,
    SequenceState,
)
from deployments.plan.kv_layout import KVCopy, KVLayout
from tests.engine.naive_kv import NaiveKV

if TYPE_CHECKING:
    from deployments.engine.grammar.matcher import TokenMatcher

LENGTH = 120


def sequence(
    name: str, token_ids: Iterable[int], *, has_images: bool = False, max_tokens: int | None = 50
) -> Sequence:
    request = SequenceRequest(
        name,
        tuple(token_ids),
        SamplingParams(max_tokens=max_tokens),
        model_inputs={"pixel_values": torch.zeros(1)} if has_images else {},
    )
    return Sequence(request, max_model_len=LENGTH, eos_token_ids=frozenset())


def table(
    num_blocks: int = 30, *, full_context_length: int = LENGTH, prefix_caching: bool = True
) -> KVTable:
    """Return a table with blocks of eight tokens; with a shorter context, of two groups."""
    capacities = tuple(sorted({LENGTH, full_context_length}, reverse=True))
    return KVTable(
        KVLayout(capacities, (num_blocks,) * len(capacities), block_size=8),
        max_num_seqs=4,
        full_context_length=full_context_length,
        prefix_caching=prefix_caching,
    )


def run(kv: KVTable, seq: Sequence) -> list[KVCopy]:
    """Admit a sequence with the prefix found for it, and compute all its tokens."""
    match = kv.find_prefix(seq)
    copies = kv.admit(seq, match.prefix)
    assert copies is not None
    seq.admit(num_cached_tokens=match.num_tokens)
    seq.num_computed_tokens = len(seq.token_ids)
    seq.handle(SequenceEvent.PREFILLED)
    return copies


def end(kv: KVTable, seq: Sequence, reason: FinishReason) -> None:
    seq.finish(reason)
    kv.remove(seq, seq.num_computed_tokens if seq.is_reusable else 0)


def retain(kv: KVTable, *prompts: Iterable[int]) -> None:
    """Run sequences together, then end them in order."""
    sequences = [sequence("r", prompt, max_tokens=1) for prompt in prompts]
    for seq in sequences:
        run(kv, seq)
    for seq in sequences:
        end(kv, seq, FinishReason.STOP)


def found(kv: KVTable, token_ids: Iterable[int], *, has_images: bool = False) -> int:
    return kv.find_prefix(sequence("s", token_ids, has_images=has_images)).num_tokens


def held(kv: KVTable) -> list[list[int]]:
    return [each.token_ids for each in kv.retained]


def test_a_running_sequence_donates_what_it_has_computed_and_keeps_it() -> None:
    kv = table()
    run(kv, donor := sequence("donor", range(40)))
    taker = sequence("taker", [*range(30), 99])
    copies = run(kv, taker)
    assert copies == [KVCopy(0, kv.extents.starts_of(donor)[0], kv.extents.starts_of(taker)[0], 30)]
    assert taker.num_cached_tokens == 30


def test_a_retained_prefix_that_is_used_up_is_taken_where_it_lies() -> None:
    kv = table()
    retain(kv, range(40))
    (retained,) = kv.retained
    start = kv.extents.starts_of(retained)
    assert run(kv, longer := sequence("turn 2", range(60))) == []
    assert kv.extents.starts_of(longer) == start
    assert held(kv) == []


def test_a_retained_prefix_of_which_little_would_be_left_is_taken_where_it_lies() -> None:
    kv = table()
    retain(kv, range(40))
    assert run(kv, sequence("again", [*range(30), 99])) == []
    assert held(kv) == []


def test_a_retained_prefix_of_which_much_is_left_stays_for_others() -> None:
    kv = table()
    retain(kv, range(60))
    (copy,) = run(kv, sequence("another", [*range(30), 99]))
    assert copy.num_tokens == 30
    assert held(kv) == [[*range(60)]]


def test_a_donor_is_taken_over_where_there_is_no_room_beside_it() -> None:
    kv = table(num_blocks=15)
    retain(kv, range(60))
    assert run(kv, taker := sequence("another", [*range(30), 99])) == []
    assert (taker.num_cached_tokens, held(kv)) == (30, [])


def test_the_least_recently_used_prefixes_leave_first_and_no_more_than_needed() -> None:
    kv = table(num_blocks=26)
    retain(kv, range(100, 150), range(200, 250), range(300, 350))  # seven blocks each
    run(kv, taker := sequence("t", [*range(100, 120), 99], max_tokens=20))  # six, five are free
    assert held(kv) == [[*range(100, 150)], [*range(300, 350)]]
    end(kv, taker, FinishReason.ERROR)


def test_prefixes_stay_as_long_as_there_is_room_beside_them() -> None:
    kv = table(num_blocks=60)
    retain(kv, range(100, 150), range(200, 250))
    for seq in [sequence(name, range(300, 340)) for name in "abc"]:
        run(kv, seq)
    assert len(held(kv)) == 2


def test_a_request_that_does_not_fit_leaves_everything_as_it_is() -> None:
    kv = table(num_blocks=20)
    retain(kv, range(100, 150))
    run(kv, sequence("a", range(30), max_tokens=50))
    assert kv.admit(sequence("b", range(300, 360), max_tokens=60), None) is None
    assert held(kv) == [[*range(100, 150)]]


def test_of_equal_prefixes_one_is_retained() -> None:
    kv = table()
    retain(kv, range(60), range(60), range(40))
    assert held(kv) == [[*range(60)]]


def test_one_token_is_always_left_to_compute() -> None:
    kv = table()
    retain(kv, range(40))
    assert found(kv, range(40)) == 39


@pytest.mark.parametrize(("num_shared", "num_found"), [(15, 0), (16, 16)])
def test_short_prefixes_are_not_reused(num_shared: int, num_found: int) -> None:
    kv = table()
    retain(kv, range(40))
    assert num_shared in (MIN_REUSED_TOKENS - 1, MIN_REUSED_TOKENS)
    assert found(kv, [*range(num_shared), 99, 98]) == num_found


def test_what_a_failed_sequence_computed_is_never_donated() -> None:
    kv = table()
    run(kv, failed := sequence("failed", range(40)))
    end(kv, failed, FinishReason.ERROR)
    assert found(kv, range(40)) == 0


def test_a_sequence_in_a_failed_pass_donates_and_retains_nothing_until_it_has_run_again() -> None:
    kv = table()
    run(kv, failed := sequence("failed", range(40)))
    failed.has_uncounted_kv = True
    assert found(kv, range(40)) == 0
    failed.has_uncounted_kv = False
    assert found(kv, range(40)) == 39
    failed.has_uncounted_kv = True
    end(kv, failed, FinishReason.ABORT)
    assert held(kv) == []


def prefilling(kv: KVTable, token_ids: Iterable[int]) -> Sequence:
    seq = sequence("prefilling", token_ids)
    assert kv.admit(seq, None) is not None
    seq.admit()
    return seq


def test_a_prefix_that_has_not_led_to_logits_is_not_donated() -> None:
    kv = table()
    early = prefilling(kv, range(40))
    early.num_computed_tokens = 39
    late = sequence("late", range(60))
    assert kv.find_prefix(late).prefix is None
    assert kv.is_prefix_pending(late, 0)
    end(kv, early, FinishReason.ABORT)
    assert held(kv) == []
    assert not kv.is_prefix_pending(late, 0)


@pytest.mark.parametrize(("num_shared", "is_pending"), [(45, False), (46, True)])
def test_a_pending_prefix_must_be_long_enough_to_be_worth_a_wait(
    num_shared: int, is_pending: bool
) -> None:
    kv = table()
    retain(kv, range(30))
    prefilling(kv, [*range(num_shared), *[99] * 9])
    late = sequence("late", range(60))
    match = kv.find_prefix(late)
    assert match.num_tokens == 30
    assert kv.is_prefix_pending(late, 30) is is_pending


def test_only_a_sequence_that_needs_all_of_a_ring_waits_for_it() -> None:
    kv = table(full_context_length=32)
    prefilling(kv, range(40))
    assert kv.is_prefix_pending(sequence("the same", range(40)), 0)
    assert kv.is_prefix_pending(sequence("longer", range(60)), 0)
    assert not kv.is_prefix_pending(sequence("another", [*range(38), 99, 98]), 0)


def test_a_wrapped_ring_donates_all_or_all_but_its_newest_token() -> None:
    kv = table(full_context_length=32)
    retain(kv, range(40))
    assert found(kv, range(60)) == 40
    assert found(kv, range(40)) == 39
    assert found(kv, range(39)) == 0
    assert found(kv, [*range(30), 99]) == 0


def test_a_prefix_that_has_left_the_window_is_kept_when_it_is_computed_again() -> None:
    kv = table(num_blocks=60, full_context_length=32)
    retain(kv, range(40))
    again = sequence("again", [*range(36), 99, 98])
    assert (kv.find_prefix(again).prefix, kv.find_prefix(again).num_lost_tokens) == (None, 36)
    assert kv.admit(again, None) is not None
    again.admit()
    again.num_computed_tokens = 36
    copies = kv.keep_prefix(again)
    assert [(copy.group, copy.num_tokens) for copy in copies] == [(0, 36), (1, 32)]
    third = [*range(36), 97]
    assert found(kv, third) == 0  # it has not led to logits yet
    again.num_computed_tokens = 38
    again.handle(SequenceEvent.PREFILLED)
    assert found(kv, third) == 36
    end(kv, again, FinishReason.STOP)
    assert found(kv, third) == 36


def test_a_kept_prefix_leaves_with_the_sequence_that_failed_to_prove_it() -> None:
    kv = table(num_blocks=60, full_context_length=32)
    again = prefilling(kv, range(40))
    again.num_computed_tokens = 36
    kv.keep_prefix(again)
    end(kv, again, FinishReason.ERROR)
    assert held(kv) == []


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "has_grammar", "num_kept"),
    [
        (40, 50, True, 39),
        (20, None, True, 19),  # it may reach the model's length
        (40, 50, False, 0),  # its answer comes back as the same tokens
        (20, 12, True, 0),  # it stays in the window, and gives any prefix
        (16, 50, True, 0),  # so few are computed again
    ],
)
def test_the_end_of_a_prompt_is_kept_where_an_answer_comes_back_as_other_tokens(
    num_prompt: int, max_tokens: int | None, has_grammar: bool, num_kept: int
) -> None:
    kv = table(num_blocks=60, full_context_length=32)
    seq = sequence("s", range(num_prompt), max_tokens=max_tokens)
    seq.matcher = cast("TokenMatcher", object()) if has_grammar else None
    assert kv.admit(seq, None) is not None
    seq.admit()
    assert kv.end_to_keep(seq) == num_kept
    if num_kept:
        seq.num_computed_tokens = num_kept
        kv.keep_prefix(seq)
        assert kv.end_to_keep(seq) == 0
        seq.num_computed_tokens = num_prompt
        seq.handle(SequenceEvent.PREFILLED)
        seq.token_ids += range(70, 100)
        seq.num_computed_tokens = num_prompt + 29
        end(kv, seq, FinishReason.STOP)
        assert found(kv, [*range(num_prompt), 119, 118]) == num_kept


def test_a_prefix_that_can_t_be_kept_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kv = table(num_blocks=15, full_context_length=32)
    again = prefilling(kv, range(70))
    again.num_computed_tokens = 36
    with caplog.at_level("INFO"):
        assert kv.keep_prefix(again) == []
    assert caplog.messages == ["a shared prefix of 36 tokens can't be kept: no room"]


def test_a_ring_that_has_not_wrapped_donates_any_prefix() -> None:
    kv = table(full_context_length=40)
    retain(kv, range(40))
    assert found(kv, [*range(30), 99]) == 30


def test_sequences_with_images_neither_donate_nor_reuse() -> None:
    kv = table()
    run(kv, pictured := sequence("image", range(40), has_images=True))
    assert found(kv, range(40)) == 0
    end(kv, pictured, FinishReason.STOP)
    assert held(kv) == []
    retain(kv, range(40))
    assert found(kv, range(40), has_images=True) == 0


def test_without_retention_nothing_is_reused() -> None:
    kv = table(prefix_caching=False)
    run(kv, donor := sequence("donor", range(40)))
    assert found(kv, range(40)) == 0
    assert not kv.is_prefix_pending(sequence("same", range(40)), 0)
    end(kv, donor, FinishReason.STOP)
    assert held(kv) == []


def test_a_sequence_of_unknown_length_grows_by_a_block_when_it_needs_one() -> None:
    kv = table(num_blocks=15)
    run(kv, seq := sequence("s", range(15), max_tokens=None))
    seq.append(1)
    assert not kv.needs_room(seq)
    seq.append(1)
    assert kv.needs_room(seq)
    assert kv.grow(seq) == []
    assert not kv.needs_room(seq)
    assert kv.usage == 3 / 15


class Simulation:
    """A scheduler driven as by the engine, with a naive memory for comparison."""

    def __init__(self, random: Random) -> None:
        self.random = random
        max_num_seqs = random.randint(1, 6)
        self.budget = max_num_seqs + random.choice([0, 3, 20, 200])
        capacities = random.choice([(LENGTH,), (LENGTH, 20), (LENGTH, 45), (45,)])
        full = KVLayout(capacities, (), 8).blocks_for(LENGTH)
        blocks = tuple(random.randint(one, one * max_num_seqs) for one in full)
        self.layout = KVLayout(capacities, blocks, 8)
        self.prefix_caching = random.random() < 0.9
        self.scheduler = Scheduler(
            self.layout,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=self.budget,
            full_context_length=min(capacities),
            prefix_caching=self.prefix_caching,
        )
        self.kv = NaiveKV(self.layout)
        self.alive: list[Sequence] = []
        self.known: list[list[int]] = []
        self.num_preempted = 0

    def arrive(self) -> None:
        """Add a sequence that begins with an earlier one's prefix or with a system prompt."""
        random = self.random
        prompt = [random.choice([1, 2])] * random.choice([2, 18, 30])
        if self.known and random.random() < 0.7:
            earlier = random.choice(self.known)
            prompt = earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])]
        prompt = prompt[:80] + [random.randint(3, 4) for _ in range(random.choice([0, 1, 12]))]
        self.known.append(prompt)
        made = sequence(
            str(len(self.known)),
            prompt,
            has_images=random.random() < 0.1,
            max_tokens=random.choice([6, 25, None]),
        )
        self.scheduler.add(made)
        self.alive.append(made)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish(reason)
        self.scheduler.remove(seq)
        self.alive.remove(seq)
        self.known.append(list(seq.token_ids))

    def promised(self) -> int | None:
        """Return the longest prefix that the queue's first sequence can get; None if unknown."""
        table = self.scheduler.table
        is_moving = any(table.needs_room(s) or s.has_prefix_to_keep for s in table.running)
        if is_moving or not self.scheduler.waiting:
            return None
        wanted = self.scheduler.waiting[0]
        if not self.prefix_caching or not wanted.can_chunk_prefill:
            return 0
        proven: list[Holder] = [
            *(s for s in table.running if s.state is SequenceState.DECODING),
            *(r for r in table.retained if r.proof is None or r.proof in self.decoding),
        ]
        donors = [(table.extents.starts_of(each), num_stored_tokens(each)) for each in proven]
        return self.kv.longest_prefix(wanted.token_ids, donors)

    @property
    def decoding(self) -> list[Sequence]:
        return [s for s in self.scheduler.running if s.state is SequenceState.DECODING]

    def step(self) -> None:
        before = {id(seq): seq.num_computed_tokens for seq in self.alive}
        waiting, promised = self.scheduler.waiting, self.promised()
        plan = self.scheduler.schedule()
        self.kv.apply(plan.copies)
        self.num_preempted += len(plan.preempted)
        if not plan.preempted:
            assert plan.admitted == waiting[: len(plan.admitted)]
        if plan.admitted and promised is not None:
            assert plan.admitted[0].num_computed_tokens == promised
        assert plan.num_tokens > 0
        is_lone_image = len(plan.prefill) == 1 and not plan.prefill[0].sequence.can_chunk_prefill
        assert plan.num_tokens <= self.budget or is_lone_image
        self.check()
        self.complete(plan)
        assert any(seq.num_computed_tokens > before[id(seq)] for seq in self.alive)
        for seq in list(self.alive):
            if len(seq.token_ids) >= seq.max_num_tokens:
                self.finish(seq, FinishReason.LENGTH)

    def check(self) -> None:
        """Check that no two extents overlap, and that all hold what they should."""
        table = self.scheduler.table
        assert set(table.running) == {s for s in self.alive if s.state is not SequenceState.WAITING}
        for pool in table.extents.pools:
            ends = [0, *(extent.end for extent in pool.extents)]
            firsts = [*(extent.first for extent in pool.extents), pool.num_blocks]
            assert all(first >= end for first, end in zip(firsts, ends, strict=True))
            assert pool.holders == {*table.running, *table.retained}
        for seq in table.running:
            assert not table.needs_room(seq)
            if seq.can_chunk_prefill:
                computed = seq.token_ids[: seq.num_computed_tokens]
                assert self.kv.gives(table.extents.starts_of(seq), computed)
        for kept in table.retained:
            assert self.kv.gives(table.extents.starts_of(kept), kept.token_ids)

    def complete(self, plan: StepPlan) -> None:
        rows: list[DecodeRow | PrefillChunk] = [*plan.decode, *plan.prefill]
        for row in rows:
            seq, start = row.sequence, row.sequence.num_computed_tokens
            end = len(seq.token_ids) if isinstance(row, DecodeRow) else row.end
            assert row.starts == self.scheduler.table.extents.starts_of(seq)
            for position in range(start, end):
                token: object = seq.token_ids[position]
                written = token if seq.can_chunk_prefill else f"image {token}"
                self.kv.write(row.starts, position, written)
            seq.num_computed_tokens = end
            if end == len(seq.token_ids):
                if seq.state is SequenceState.PREFILLING:
                    seq.handle(SequenceEvent.PREFILLED)
                seq.append(self.random.randint(3, 4))


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_every_extent_holds_what_its_sequence_needs_whatever_comes_and_goes(seed: int) -> None:
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
