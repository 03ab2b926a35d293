"""Which tokens run in the next step.

Owns the waiting line and the slots' occupancy. It decides and returns: no tensors, no I/O.

Policy: every decoding sequence gets its one token; what is left of the step's token budget goes to
prefill chunks, those begun first, then the waiting line, oldest first. A prompt with images can't
be cut, so it runs when it fits into what is left, or when nothing else was prefilled in the step.

The running sequences always hold the slots 0 .. n-1: when one leaves, the last takes its place.

When memory is short, the engine lowers `max_step_tokens`. Each running sequence needs one token of
a step, so the newest beyond that number are preempted: they go back to their place in the line.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.engine.sequence import Sequence, SequenceEvent, SequenceState


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The tokens `start` .. `end`-1 of a sequence, to be prefilled into its slot."""

    sequence: Sequence
    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The newest token of a running sequence."""

    sequence: Sequence
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs; decode rows in the order of their slots."""

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillChunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode) + sum(chunk.end - chunk.start for chunk in self.prefill)


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy the keys and values of `length` tokens from one slot to another."""

    source: int
    target: int
    length: int


class Scheduler:
    """FIFO admission into slots under a token budget."""

    def __init__(self, *, max_num_seqs: int, max_batched_tokens: int) -> None:
        """Start empty.

        Args:
            max_num_seqs: Number of slots.
            max_batched_tokens: Most tokens in one step; at least max_num_seqs. `max_step_tokens`
                starts there and may be set lower, to 1 or more.
        """
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs")
        self._max_num_seqs = max_num_seqs
        self.max_step_tokens = max_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold a slot, in the order of their slots."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without a slot, oldest first."""
        return tuple(self._waiting)

    @property
    def excess(self) -> list[Sequence]:
        """Running sequences beyond what a step may run: the newest, newest first."""
        oldest_first = sorted(self._running, key=lambda sequence: sequence.arrival)
        return oldest_first[self.max_step_tokens :][::-1]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the waiting line."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Admit what fits and return the next step's work."""
        decode = tuple(
            DecodeRow(sequence, slot)
            for slot, sequence in enumerate(self._running)
            if sequence.state is SequenceState.DECODING
        )
        return StepPlan(decode, tuple(self._prefill(self.max_step_tokens - len(decode))))

    def _prefill(self, budget: int) -> Iterator[PrefillChunk]:
        is_first = True
        for slot, sequence in self._candidates():
            num_tokens = sequence.num_uncomputed_tokens
            if sequence.is_divisible:
                num_tokens = min(num_tokens, budget)
            if num_tokens == 0 or (num_tokens > budget and not is_first):
                return
            if sequence.state is SequenceState.WAITING:
                self._admit(sequence)
            start = sequence.num_computed_tokens
            yield PrefillChunk(sequence, slot, start, start + num_tokens)
            budget = max(0, budget - num_tokens)
            is_first = False

    def _candidates(self) -> Iterator[tuple[int, Sequence]]:
        """Yield what could be prefilled, with its slot; the caller admits before it goes on."""
        for slot, sequence in enumerate(self._running):
            if sequence.state is SequenceState.PREFILLING:
                yield slot, sequence
        most = min(self._max_num_seqs, self.max_step_tokens)
        while self._waiting and len(self._running) < most:
            yield len(self._running), self._waiting[0]

    def _admit(self, sequence: Sequence) -> None:
        sequence.handle(SequenceEvent.ADMIT)
        self._waiting.popleft()
        self._running.append(sequence)

    def slot_of(self, sequence: Sequence) -> int | None:
        """Return the sequence's slot, or None while it waits."""
        return next((i for i, other in enumerate(self._running) if other is sequence), None)

    def remove(self, sequence: Sequence) -> SlotMove | None:
        """Let a sequence go; return the move that closes its gap, if one is needed.

        Raises:
            ValueError: The sequence is neither running nor waiting.
        """
        slot = self.slot_of(sequence)
        if slot is None:
            self._waiting.remove(sequence)
            return None
        return self._vacate(slot)

    def preempt(self, sequence: Sequence) -> SlotMove | None:
        """Send a running sequence back to its place in the waiting line, to be computed anew.

        Returns:
            The move that closes its gap, if one is needed.

        Raises:
            IllegalTransitionError: The sequence is not running; nothing was changed.
        """
        sequence.preempt()
        slot = self.slot_of(sequence)
        assert slot is not None
        insort(self._waiting, sequence, key=lambda other: other.arrival)
        return self._vacate(slot)

    def _vacate(self, slot: int) -> SlotMove | None:
        """Let the last running sequence take this slot."""
        last = self._running.pop()
        if slot == len(self._running):
            return None
        self._running[slot] = last
        # All that may have been written, what a failed step has left included.
        return SlotMove(len(self._running), slot, len(last.token_ids))
