"""What must hold in an engine between two steps.

Read by `Engine.check`, for tests and for whoever hunts a bug. It reads all slots, so it is no part
of a step.
"""

from collections.abc import Collection, Iterator, Mapping

from deployments.engine.kv_slots import KVSlots
from deployments.engine.scheduler import Scheduler
from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.step_budget import StepBudget


class InvariantError(AssertionError):
    """A bug of ours: the engine's parts contradict each other; the message names all that do."""


def check_invariants(
    *,
    sequences: Mapping[str, Sequence],
    transcripts: Collection[str],
    scheduler: Scheduler,
    budget: StepBudget,
    kv: KVSlots,
) -> None:
    """Prove that nothing is lost, doubled or left behind.

    Args:
        sequences: What the engine holds, by id.
        transcripts: The ids whose text is written.
        scheduler: Who runs and who waits.
        budget: What a step may run.
        kv: The slots.

    Raises:
        InvariantError: Something is broken.
    """
    broken = [
        *_broken_books(sequences, transcripts, scheduler),
        *_broken_states(scheduler),
        *_broken_counters(scheduler, budget, kv),
        *_dirty_slots(scheduler, kv),
    ]
    if broken:
        raise InvariantError("; ".join(broken))


def _broken_books(
    sequences: Mapping[str, Sequence], transcripts: Collection[str], scheduler: Scheduler
) -> Iterator[str]:
    """Compare who is known with who runs or waits."""
    scheduled = (*scheduler.running, *scheduler.waiting)
    names = [sequence.sequence_id for sequence in scheduled]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name} is scheduled more than once"
    for name in sorted(sequences.keys() ^ set(names)):
        yield f"{name} is {'not scheduled' if name in sequences else 'scheduled but not known'}"
    for name in sorted(sequences.keys() ^ set(transcripts)):
        yield f"{name} has {'no' if name in sequences else 'left a'} transcript"
    for sequence in scheduled:
        if sequences.get(sequence.sequence_id, sequence) is not sequence:
            yield f"{sequence.sequence_id} is another one in the schedule"


def _broken_states(scheduler: Scheduler) -> Iterator[str]:
    """Compare each sequence's state with its place and its counts."""
    for slot, sequence in enumerate(scheduler.running):
        if scheduler.slot_of(sequence) != slot:
            yield f"{sequence.sequence_id} runs in slot {slot}, but is looked for elsewhere"
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
        is_over = len(sequence.token_ids) >= sequence.max_num_tokens
        if is_over or sequence.num_computed_tokens < 0 or sequence.finish_reason is not None:
            yield f"{sequence.sequence_id} should have ended"


def _broken_counters(scheduler: Scheduler, budget: StepBudget, kv: KVSlots) -> Iterator[str]:
    num_known = len(scheduler.num_tokens_by_slot)
    if num_known != kv.num_slots:
        yield f"the books have {num_known} of {kv.num_slots} slots"
    if scheduler.excess:
        yield f"{len(scheduler.excess)} more run than a step has tokens for"
    if not 1 <= budget.tokens <= budget.max_tokens:
        yield f"a step may run {budget.tokens} of {budget.max_tokens} tokens"
    if scheduler.max_step_tokens != budget.tokens:
        yield f"the scheduler plans {scheduler.max_step_tokens} tokens, not {budget.tokens}"
    arrivals = [sequence.arrival for sequence in scheduler.waiting]
    if arrivals != sorted(set(arrivals)):
        yield "the waiting line is out of order"


def _dirty_slots(scheduler: Scheduler, kv: KVSlots) -> Iterator[str]:
    """Find keys and values where no sequence can have written any."""
    for slot, num_used in enumerate(scheduler.num_tokens_by_slot[: kv.num_slots]):
        for tensor in (*kv.keys, *kv.values):
            if bool(tensor[slot, num_used:].count_nonzero()):
                yield f"slot {slot} is not zero behind token {num_used}"
                break
