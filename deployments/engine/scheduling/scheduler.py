"""Decides which tokens run in the next step.

Owns the waiting queue; the KV table owns the occupancy of the KV memory. It decides and returns: no
tensors, no I/O.

Policy: every decoding sequence gets its one token. The rest of the step's token budget, or as much
of it as does not keep running sequences waiting for long, goes to prefill chunks: first to prompts
already begun, then to the waiting queue. A prompt with images can't be cut into chunks, so it runs
when it fits into the remaining budget, or when the step has no other prefill.

Sequences that another engine had accepted wait before those that are new: their clients have been
promised an answer, and most have seen a part of it. Otherwise the oldest goes first. New sequences
can't starve, because resumed ones come from replicas that have ended: they are at most as many as
those replicas held, and each leaves the queue once.

An admitted sequence takes over the longest matching prefix in the KV memory. The queue waits while
a running sequence is computing more of the prefix that the queue's first sequence needs, so that a
burst of prompts with a common prefix computes it once.

The queue's first sequence waits until the KV memory has room for all tokens that it may reach. If
that number is unknown, it grows while it runs. If a running sequence can't grow, the last sequences
in the queue's order are preempted: they return to their place in the queue, and go on later with
all their tokens. So the oldest always makes progress.

A sequence whose prompt's log-probabilities are wanted computes its whole prompt, and few rows of it
in a step, since logits take much more memory than other activations. Once a step's rows of this
kind are taken, the queue goes on with the sequences behind those that need some. These keep their
place, so they are the first to run when rows are left.

When memory for steps is short, the engine lowers `max_step_tokens`. Each running sequence needs one
token of a step, so the last sequences in the queue's order beyond that number are preempted, too.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.engine.scheduling.kv_table import KVTable
from deployments.engine.scheduling.sequence import Sequence, SequenceState
from deployments.plan.kv_layout import KVCopy, KVLayout

MAX_SCORED_ROWS = 1024
"""The most rows of prompts in a step whose logits are computed for log-probabilities. It bounds
what one delta holds."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The tokens `start` .. `end`-1 of a sequence, to be prefilled.

    `starts` is the first token of the sequence's extent in each group.
    """

    sequence: Sequence
    starts: tuple[int, ...]
    start: int
    end: int

    @property
    def has_images(self) -> bool:
        """Whether it is a whole prompt with images."""
        return self.start == 0 and not self.sequence.can_chunk_prefill

    @property
    def scored(self) -> range:
        """Positions of the prompt's tokens to report with their log-probabilities after its rows.

        A row gives those of the token after it, so no row gives the first token's.
        """
        if not self.sequence.is_scoring:
            return range(0)
        first = self.sequence.num_scored_tokens
        return range(first, min(self.end + 1, self.sequence.num_prompt_tokens))


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The newest token of a running sequence; `starts` as in `PrefillChunk`."""

    sequence: Sequence
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        decode: The decode rows.
        prefill: At most one chunk of each sequence.
        copies: Copies in the KV memory to make before the step, in order.
        admitted: The sequences that began to run.
        preempted: The sequences that returned to the queue because the KV memory is full.
    """

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillChunk, ...]
    copies: tuple[KVCopy, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the model processes."""
        return len(self.decode) + sum(chunk.end - chunk.start for chunk in self.prefill)


class Scheduler:
    """Admission under a token budget and within the KV memory: by who goes first, then by age.

    Attributes:
        max_step_tokens: The most tokens of a step.
        max_prompt_tokens: The most of them that are tokens of prompts, where sequences decode.
        table: The occupancy of the KV memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        full_context_length: int,
        prefix_caching: bool,
        max_scored_rows: int = MAX_SCORED_ROWS,
    ) -> None:
        """Start without sequences.

        Args:
            layout: The KV memory.
            max_num_seqs: The most sequences that run at once.
            max_batched_tokens: Most tokens in one step; at least max_num_seqs. It is the initial
                value of `max_step_tokens`, which may be lowered to 1.
            full_context_length: See `KVTable`.
            prefix_caching: Whether sequences share common prefixes.
            max_scored_rows: The most rows of prompts in one step for whose log-probabilities there
                is memory.
        """
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs")
        self.max_step_tokens = max_batched_tokens
        self.max_prompt_tokens = max_batched_tokens
        self._max_scored_rows = min(max_scored_rows, MAX_SCORED_ROWS)
        self._waiting: deque[Sequence] = deque()
        self._num_arrivals = 0
        self.table = KVTable(
            layout,
            max_num_seqs=max_num_seqs,
            full_context_length=full_context_length,
            prefix_caching=prefix_caching,
        )

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that run."""
        return len(self.table.running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that run, in the order of their admission."""
        return tuple(self.table.running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait, in the order in which they will run."""
        return tuple(self._waiting)

    @property
    def excess(self) -> list[Sequence]:
        """Running sequences that exceed `max_step_tokens`, the last in the queue's order first."""
        ordered = sorted(self.table.running, key=_turn)
        return ordered[self.max_step_tokens :][::-1]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting queue: behind all that are its equals."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self._waiting, sequence, key=_turn)

    def schedule(self) -> StepPlan:
        """Make room for what runs, admit what fits, and return the next step's work."""
        copies: list[KVCopy] = []
        preempted = self._make_room(copies)
        decode = [s for s in self.table.running if s.state is SequenceState.DECODING]
        num_before = self.num_running
        budget = self.max_step_tokens - len(decode)
        if decode:
            budget = min(budget, self.max_prompt_tokens)
        chunks = list(self._prefill(budget, copies))
        # Only now is it known where everything lies: an admission may move others.
        starts_of = self.table.extents.starts_of
        return StepPlan(
            tuple(DecodeRow(sequence, starts_of(sequence)) for sequence in decode),
            tuple(PrefillChunk(s, starts_of(s), first, end) for s, first, end in chunks),
            tuple(copies),
            tuple(self.table.running[num_before:]),
            tuple(preempted),
        )

    def _make_room(self, copies: list[KVCopy]) -> list[Sequence]:
        """Let running sequences grow, the first in the queue's order first.

        Returns:
            The sequences that were preempted for it.
        """
        preempted: list[Sequence] = []
        growing = [s for s in self.table.running if self.table.needs_room(s)]
        for sequence in sorted(growing, key=_turn):
            while sequence.state is not SequenceState.WAITING:
                grown = self.table.grow(sequence)
                if grown is not None:
                    copies += grown
                    break
                last = max(self.table.running, key=_turn)
                self.preempt(last)
                preempted.append(last)
        return preempted

    def _prefill(self, budget: int, copies: list[KVCopy]) -> Iterator[tuple[Sequence, int, int]]:
        """Yield chunks: a sequence, its first token and the one after its last."""
        is_first = True
        num_rows_left = self._max_scored_rows
        for sequence in self._candidates():
            num_whole = sequence.num_indivisible_tokens
            if budget == 0 if num_whole == 1 else num_whole > budget and not is_first:
                return
            if sequence.is_scoring and not num_rows_left:
                continue
            if sequence.state is SequenceState.WAITING and not self._admit(sequence, copies):
                return
            if sequence.has_prefix_to_keep:
                copies += self.table.keep_prefix(sequence)
                sequence.prefix_to_keep = self.table.end_to_keep(sequence)
            num_tokens = num_whole
            if num_whole == 1:
                num_tokens = min(sequence.num_tokens_to_prefill, budget)
            if sequence.is_scoring:
                num_tokens = min(num_tokens, num_rows_left)
                num_rows_left -= num_tokens
            start = sequence.num_computed_tokens
            yield sequence, start, start + num_tokens
            budget = max(0, budget - num_tokens)
            is_first = False

    def _candidates(self) -> Iterator[Sequence]:
        """Yield sequences to prefill; before the next, the caller admits each or passes it over."""
        yield from [s for s in self.table.running if s.state is SequenceState.PREFILLING]
        num_passed = 0
        while self.table.has_place and self.num_running < self.max_step_tokens:
            if num_passed == len(self._waiting):
                return
            sequence = self._waiting[num_passed]
            yield sequence
            num_passed += sequence.state is SequenceState.WAITING

    def _admit(self, sequence: Sequence, copies: list[KVCopy]) -> bool:
        """Let a sequence of the queue run, if there is room and no prefix is pending."""
        match = self.table.find_prefix(sequence)
        if self.table.is_prefix_pending(sequence, match.num_tokens):
            return False
        needed = self.table.admit(sequence, match.prefix)
        if needed is None:
            return False
        copies += needed
        sequence.admit(num_cached_tokens=match.num_tokens)
        sequence.prefix_to_keep = match.num_lost_tokens or self.table.end_to_keep(sequence)
        self._waiting.remove(sequence)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Drop a finished sequence.

        Raises:
            ValueError: The sequence is neither running nor waiting.
        """
        if sequence in self.table.running:
            num_tokens = sequence.num_computed_tokens if sequence.is_reusable else 0
            self.table.remove(sequence, num_tokens)
        else:
            self._waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to its place in the waiting queue; it is recomputed later.

        What it has computed is retained as long as there is room.

        Raises:
            IllegalTransitionError: The sequence is not running; nothing was changed.
        """
        is_reusable = sequence.state is SequenceState.DECODING and not sequence.has_uncounted_kv
        num_computed_tokens = sequence.num_computed_tokens
        sequence.preempt()
        self.table.remove(sequence, num_computed_tokens if is_reusable else 0)
        insort(self._waiting, sequence, key=_turn)


def _turn(sequence: Sequence) -> tuple[bool, int]:
    return sequence.turn
