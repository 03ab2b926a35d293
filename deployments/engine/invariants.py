"""Invariants of an engine between two steps.

`Engine.check` runs these checks in tests and when debugging. They look at everything, which is too
slow for a step.
"""

from collections.abc import Collection, Iterator, Mapping

from deployments.compute.token_budget import TokenBudget
from deployments.engine.scheduling.kv_table import KVTable
from deployments.engine.scheduling.prefixes import Holder, num_stored_tokens
from deployments.engine.scheduling.scheduler import Scheduler
from deployments.engine.scheduling.sequence import Sequence, SequenceState


class InvariantError(AssertionError):
    """A bug in the engine: its parts contradict each other; the message lists how."""


def check_invariants(
    *,
    sequences: Mapping[str, Sequence],
    detokenized: Collection[str],
    scheduler: Scheduler,
    budget: TokenBudget,
) -> None:
    """Check that no sequence, block or token is lost, duplicated or left behind.

    Args:
        sequences: The engine's sequences, by id.
        detokenized: Ids of the sequences that have a detokenizer.
        scheduler: Knows which sequences run and which wait.
        budget: The token budget of a step.

    Raises:
        InvariantError: An invariant is broken.
    """
    broken = [
        *_broken_membership(sequences, detokenized, scheduler),
        *_broken_states(scheduler),
        *_broken_counters(scheduler, budget),
        *_broken_extents(scheduler.table),
    ]
    if broken:
        raise InvariantError("; ".join(broken))


def _broken_membership(
    sequences: Mapping[str, Sequence], detokenized: Collection[str], scheduler: Scheduler
) -> Iterator[str]:
    """Compare the known sequences with those that run or wait."""
    scheduled = (*scheduler.running, *scheduler.waiting)
    names = [sequence.sequence_id for sequence in scheduled]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name} is scheduled more than once"
    for name in sorted(sequences.keys() ^ set(names)):
        yield f"{name} is {'not scheduled' if name in sequences else 'scheduled but not known'}"
    for name in sorted(sequences.keys() ^ set(detokenized)):
        yield f"{name} has {'no' if name in sequences else 'left a'} detokenizer"
    for sequence in scheduled:
        if sequences.get(sequence.sequence_id, sequence) is not sequence:
            yield f"{sequence.sequence_id} is a different object in the schedule"


def _broken_states(scheduler: Scheduler) -> Iterator[str]:
    """Compare each sequence's state with its counts."""
    for sequence in scheduler.running:
        num_left = sequence.num_uncomputed_tokens
        is_prefilling = sequence.state is SequenceState.PREFILLING and num_left > 0
        is_decoding = sequence.state is SequenceState.DECODING and num_left == 1
        if not is_prefilling and not is_decoding:
            yield f"{sequence.sequence_id} runs while {sequence.state}, {num_left} tokens behind"
    for sequence in scheduler.waiting:
        if sequence.state is not SequenceState.WAITING or sequence.num_computed_tokens:
            yield (
                f"{sequence.sequence_id} waits while {sequence.state}, "
                f"with {sequence.num_computed_tokens} tokens computed"
            )
    for sequence in (*scheduler.running, *scheduler.waiting):
        # With max_tokens 0, a sequence is full from the start and ends after its prefill.
        is_over = sequence.is_full and sequence.request.params.max_tokens != 0
        if is_over or sequence.num_computed_tokens < 0 or sequence.finish_reason is not None:
            yield f"{sequence.sequence_id} should have ended"


def _broken_counters(scheduler: Scheduler, budget: TokenBudget) -> Iterator[str]:
    if scheduler.excess:
        yield f"{len(scheduler.excess)} more sequences run than a step has tokens for"
    if not 1 <= budget.tokens <= budget.max_tokens:
        yield f"a step may run {budget.tokens} of {budget.max_tokens} tokens"
    if scheduler.max_step_tokens != budget.tokens:
        yield f"the scheduler plans {scheduler.max_step_tokens} tokens, not {budget.tokens}"
    turns = [sequence.turn for sequence in scheduler.waiting]
    if turns != sorted(set(turns)):
        yield "the waiting queue is out of order"


def _broken_extents(table: KVTable) -> Iterator[str]:
    """Compare the blocks of each group with those who should hold them."""
    holders: set[Holder] = {*table.running, *table.retained}
    for group, pool in enumerate(table.extents.pools):
        if pool.holders != holders:
            yield f"group {group} has {len(pool.holders)} holders, not {len(holders)}"
        end = 0
        for extent in pool.extents:
            if extent.first < end or extent.num_blocks < 1:
                yield f"the extent at block {extent.first} of group {group} overlaps or is empty"
            end = extent.end
        num_free = pool.num_blocks - sum(extent.num_blocks for extent in pool.extents)
        if end > pool.num_blocks or num_free != pool.num_free:
            yield f"group {group} has {num_free} free blocks, not {pool.num_free}"
    for holder in holders & table.extents.pools[0].holders:
        size = table.layout.block_size * table.extents.pools[0][holder].num_blocks
        num_tokens = num_stored_tokens(holder)
        if size < min(num_tokens, table.layout.capacities[0]):
            yield f"an extent of {size} tokens holds {num_tokens}"
