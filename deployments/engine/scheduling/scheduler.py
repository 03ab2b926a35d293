"""Decides which tokens run in the next step.

Owns the waiting queue; the slot table owns the slots' occupancy. It decides and returns: no
tensors, no I/O.

Policy: every decoding sequence gets its one token. The rest of the step's token budget goes to
prefill chunks: first to prompts already begun, then to the waiting queue. A prompt with images
can't be cut into chunks, so it runs when it fits into the remaining budget, or when the step has no
other prefill.

Sequences that another engine had accepted wait before those that are new: their clients have been
promised an answer, and most have seen a part of it. Otherwise the oldest goes first. New sequences
can't starve, because resumed ones come from replicas that have ended: they are at most as many as
those replicas held, and each leaves the queue once.

An admitted sequence takes over the longest matching prefix in any slot. The queue waits while a
running sequence is computing more of the prefix that the queue's first sequence needs, so that a
burst of prompts with a common prefix computes it once.

When memory is short, the engine lowers `max_step_tokens`. Each running sequence needs one token of
a step, so the last sequences in the queue's order beyond that number are preempted: they return to
their place in the queue.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.engine.scheduling.sequence import Sequence, SequenceState
from deployments.engine.scheduling.slot_edits import SlotEdit
from deployments.engine.scheduling.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The tokens `start` .. `end`-1 of a sequence, to be prefilled into its slot."""

    sequence: Sequence
    slot: int
    start: int
    end: int

    @property
    def has_images(self) -> bool:
        """Whether it is a whole prompt with images."""
        return self.start == 0 and not self.sequence.can_chunk_prefill


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The newest token of a running sequence."""

    sequence: Sequence
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        decode: The decode rows, in slot order.
        prefill: At most one chunk of each sequence.
        edits: Edits of the slots to apply before the step.
        admitted: The sequences that were given a slot.
    """

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillChunk, ...]
    edits: tuple[SlotEdit, ...] = ()
    admitted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the model processes."""
        return len(self.decode) + sum(chunk.end - chunk.start for chunk in self.prefill)


class Scheduler:
    """Admission into slots under a token budget: resumed sequences first, then by age."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        full_context_length: int,
        prefix_caching: bool = True,
    ) -> None:
        """Start without sequences.

        Args:
            max_num_seqs: Number of slots.
            max_batched_tokens: Most tokens in one step; at least max_num_seqs. It is the initial
                value of `max_step_tokens`, which may be lowered to 1.
            full_context_length: See `SlotTable`.
            prefix_caching: Whether sequences share common prefixes.
        """
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs")
        self.max_step_tokens = max_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._num_arrivals = 0
        self._table = SlotTable(
            num_slots=max_num_seqs, full_context_length=full_context_length, retains=prefix_caching
        )

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self._table.running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold a slot, in slot order."""
        return tuple(self._table.running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without a slot, in the order in which they get one."""
        return tuple(self._waiting)

    @property
    def num_tokens_by_slot(self) -> tuple[int, ...]:
        """The most tokens that each slot may hold; see `SlotTable`."""
        return self._table.num_tokens_by_slot

    @property
    def excess(self) -> list[Sequence]:
        """Running sequences that exceed `max_step_tokens`, the last in the queue's order first."""
        ordered = sorted(self._table.running, key=_turn)
        return ordered[self.max_step_tokens :][::-1]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting queue: behind all that are its equals."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self._waiting, sequence, key=_turn)

    def schedule(self) -> StepPlan:
        """Admit the sequences that fit and return the next step's work."""
        decode = tuple(
            DecodeRow(sequence, slot)
            for slot, sequence in enumerate(self._table.running)
            if sequence.state is SequenceState.DECODING
        )
        edits: list[SlotEdit] = []
        num_before = self.num_running
        prefill = tuple(self._prefill(self.max_step_tokens - len(decode), edits))
        admitted = self._table.running[num_before:]
        return StepPlan(decode, prefill, tuple(edits), tuple(admitted))

    def _prefill(self, budget: int, edits: list[SlotEdit]) -> Iterator[PrefillChunk]:
        is_first = True
        for slot, sequence in self._candidates():
            prefix = None
            num_tokens = sequence.num_uncomputed_tokens
            if sequence.state is SequenceState.WAITING:
                prefix = self._table.find_prefix(sequence)
                if self._table.is_prefix_pending(sequence, prefix):
                    return
                num_tokens -= prefix.num_tokens if prefix else 0
            num_whole = sequence.num_indivisible_tokens
            num_tokens = min(num_tokens, budget) if num_whole == 1 else num_whole
            if num_tokens == 0 or (num_tokens > budget and not is_first):
                return
            if sequence.state is SequenceState.WAITING:
                sequence.admit(num_cached_tokens=prefix.num_tokens if prefix else 0)
                edits += self._table.admit(self._waiting.popleft(), prefix)
            start = sequence.num_computed_tokens
            yield PrefillChunk(sequence, slot, start, start + num_tokens)
            budget = max(0, budget - num_tokens)
            is_first = False

    def _candidates(self) -> Iterator[tuple[int, Sequence]]:
        """Yield sequences to prefill, with their slots; the caller admits each before the next."""
        for slot, sequence in enumerate(self._table.running):
            if sequence.state is SequenceState.PREFILLING:
                yield slot, sequence
        while self._waiting and self._table.has_room and self.num_running < self.max_step_tokens:
            yield self.num_running, self._waiting[0]

    def slot_of(self, sequence: Sequence) -> int | None:
        """Return the sequence's slot, or None while it waits."""
        return self._table.slot_of(sequence)

    def remove(self, sequence: Sequence) -> tuple[SlotEdit, ...]:
        """Drop a finished sequence and return the resulting edits of the slots.

        Raises:
            ValueError: The sequence is neither running nor waiting.
        """
        if self.slot_of(sequence) is None:
            self._waiting.remove(sequence)
            return ()
        return tuple(self._table.remove(sequence))

    def preempt(self, sequence: Sequence) -> tuple[SlotEdit, ...]:
        """Return a running sequence to its place in the waiting queue; it is recomputed later.

        Returns:
            Edits that close the gap and clean its slot.

        Raises:
            IllegalTransitionError: The sequence is not running; nothing was changed.
        """
        sequence.preempt()
        insort(self._waiting, sequence, key=_turn)
        return tuple(self._table.remove(sequence))


def _turn(sequence: Sequence) -> tuple[bool, int]:
    return sequence.turn
