"""Tracks which sequence occupies each slot and which prefixes new sequences can reuse.

Owns the slots' occupancy. It decides, and returns the edits that the slots then need: no tensors.

The running sequences always hold slots 0 .. n-1, so that decoding reads views: when one ends, the
last running one swaps slots with it. Every other slot is either clean or retains the keys and
values of a sequence that ended well. A new sequence that shares a prefix with a running sequence or
a retained slot takes over the keys and values of that prefix instead of computing them. It goes
into a clean slot, or else into the least recently used retained one.

Keys and values depend only on the tokens up to their own position, so token ids identify a prefix.
They don't identify images: a sequence with images neither donates nor reuses. No mask hides a NaN,
so a token that yields one spoils everything prefilled together with it. Therefore only sequences
past their prefill donate: their logits, which depend on all that their slot holds, were finite. A
sequence whose latest pass failed does not donate, since it may have written more than was counted.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from deployments.engine.scheduling.sequence import Sequence, SequenceState
from deployments.engine.scheduling.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe

MIN_REUSED_TOKENS = 16
"""Shorter prefixes are not worth a copy or a wait: unrelated prompts share the first words of a
chat template, and prefilling so few tokens costs next to nothing."""


@dataclass(slots=True)
class Retained:
    """A free slot that still holds the keys and values of an ended sequence.

    Attributes:
        token_ids: The sequence's tokens.
        last_used: When a sequence last ended in the slot or took a prefix from it, on the table's
            clock, which counts these events.
    """

    token_ids: list[int]
    last_used: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a sequence that a slot holds."""

    slot: int
    num_tokens: int


class SlotTable:
    """The running sequences, followed by the free slots and what they retain."""

    def __init__(self, *, num_slots: int, full_context_length: int, retains: bool) -> None:
        """Start with clean slots.

        Args:
            num_slots: Number of slots.
            full_context_length: Longest sequence that a slot holds in full. For a longer one,
                layers with a sliding window keep only the window.
            retains: Whether slots keep and share prefixes.
        """
        self.running: list[Sequence] = []
        self._free: list[Retained | None] = [None] * num_slots
        self._full_context_length = full_context_length
        self._retains = retains
        self._clock = 0

    @property
    def has_room(self) -> bool:
        """Whether another sequence can be admitted."""
        return bool(self._free)

    @property
    def num_tokens_by_slot(self) -> tuple[int, ...]:
        """The most tokens that each slot may hold: its running sequence's or the retained ones."""
        retained = (0 if free is None else len(free.token_ids) for free in self._free)
        return (*(len(sequence.token_ids) for sequence in self.running), *retained)

    def slot_of(self, sequence: Sequence) -> int | None:
        """Return the slot of a sequence, or None if it is not running."""
        return next((i for i, other in enumerate(self.running) if other is sequence), None)

    def find_prefix(self, sequence: Sequence) -> Prefix | None:
        """Return the longest prefix that a slot can give a sequence now.

        The prefix leaves at least one token to compute, since only computed tokens yield logits.
        """
        best: Prefix | None = None
        if self._retains and sequence.can_chunk_prefill:
            wanted, longest = sequence.token_ids, MIN_REUSED_TOKENS - 1
            limit = len(wanted) - 1
            for slot, token_ids, num_tokens in self._donors():
                end = min(limit, num_tokens)
                if end <= longest or not self._keeps_context(end, num_tokens):
                    continue
                # Comparing the one token that a longer match needs avoids most full comparisons.
                if token_ids[longest] != wanted[longest]:
                    continue
                shared = num_shared_tokens(token_ids, wanted, end)
                if shared > longest and self._keeps_context(shared, num_tokens):
                    best, longest = Prefix(slot, shared), shared
        return best

    def _donors(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield each donor's slot, token ids, and how many of those tokens the slot holds."""
        for slot, retained in enumerate(self._free, start=len(self.running)):
            if retained is not None:
                yield slot, retained.token_ids, len(retained.token_ids)
        for slot, other in enumerate(self.running):
            is_past_prefill = other.state is SequenceState.DECODING
            if is_past_prefill and other.can_chunk_prefill and not other.has_uncounted_kv:
                yield slot, other.token_ids, other.num_computed_tokens

    def _keeps_context(self, num_wanted: int, num_held: int) -> bool:
        """Return whether a slot of num_held tokens has all that token num_wanted needs to see.

        A ring that has wrapped holds the window of its newest token. That is enough to compute the
        next token, or the newest one again, but no earlier one.
        """
        limit = self._full_context_length
        return num_held <= limit or num_wanted >= num_held - 1

    def is_prefix_pending(self, sequence: Sequence, found: Prefix | None) -> bool:
        """Return whether a sequence in prefill will soon offer a longer prefix.

        Prefilling sequences go first in every step, so the wait costs about one step. It always
        ends: the first of them makes progress in every step, or leaves.
        """
        if not self._retains or not sequence.can_chunk_prefill:
            return False
        worth_waiting = (found.num_tokens if found else 0) + MIN_REUSED_TOKENS
        return any(
            self._will_share(other, sequence.token_ids, worth_waiting)
            for other in self.running
            if other.state is SequenceState.PREFILLING and other.can_chunk_prefill
        )

    def _will_share(self, other: Sequence, wanted: list[int], num_tokens: int) -> bool:
        """Return whether another sequence, once prefilled, can give at least num_tokens."""
        num_held = len(other.token_ids)
        if not self._keeps_context(num_tokens, num_held):
            num_tokens = num_held - 1
        if num_tokens > min(len(wanted) - 1, num_held):
            return False
        return other.token_ids[:num_tokens] == wanted[:num_tokens]

    def admit(self, sequence: Sequence, prefix: Prefix | None) -> list[SlotEdit]:
        """Give a sequence the first free slot, with the prefix from `find_prefix`.

        Returns:
            Edits that put the prefix into the slot and zeros after it.
        """
        slot = len(self.running)
        donor = prefix.slot - slot if prefix else None
        index = self._victim(donor)
        if prefix is not None and donor is not None and self._is_consumed(prefix, donor):
            index = donor
        edits = self._swap_free(0, index)
        num_kept = prefix.num_tokens if prefix and index == donor else 0
        replaced = self._free.pop(0)
        self.running.append(sequence)
        if replaced is not None and num_kept < len(replaced.token_ids):
            edits.append(SlotWipe(slot, num_kept, len(replaced.token_ids)))
        if prefix is not None and index != donor:
            # If the donor was the first free slot, its contents were just swapped to `index`.
            source = slot + index if donor == 0 else prefix.slot
            edits.append(SlotCopy(source, slot, prefix.num_tokens))
            self._touch(source)
        return edits

    def _is_consumed(self, prefix: Prefix, donor: int) -> bool:
        """Return whether a retained slot has too few tokens besides the prefix to be worth keeping.

        Args:
            prefix: The prefix to take.
            donor: Index of the slot among the free slots; negative for a running sequence's.
        """
        retained = self._free[donor] if donor >= 0 else None
        return (
            retained is not None and len(retained.token_ids) - prefix.num_tokens < MIN_REUSED_TOKENS
        )

    def _victim(self, donor: int | None) -> int:
        """Return the free slot that a new sequence takes: the donor's only if no other is free."""

        def rank(index: int) -> tuple[bool, int]:
            retained = self._free[index]
            return index == donor, 0 if retained is None else retained.last_used

        return min(range(len(self._free)), key=rank)

    def _swap_free(self, first: int, second: int) -> list[SlotEdit]:
        free, base = self._free, len(self.running)
        length = max(len(r.token_ids) if r else 0 for r in (free[first], free[second]))
        free[first], free[second] = free[second], free[first]
        if first == second or length == 0:
            return []
        return [SlotSwap(base + first, base + second, length)]

    def _touch(self, slot: int) -> None:
        retained = self._free[slot - len(self.running)] if slot >= len(self.running) else None
        if retained is not None:
            self._clock += 1
            retained.last_used = self._clock

    def remove(self, sequence: Sequence) -> list[SlotEdit]:
        """Free a running sequence's slot.

        Returns:
            Edits that close the gap and, unless the slot is retained, clean it.
        """
        slot = self.slot_of(sequence)
        assert slot is not None
        edits: list[SlotEdit] = []
        last = self.running.pop()
        freed = len(self.running)
        if last is not sequence:
            self.running[slot] = last
            length = max(len(sequence.token_ids), len(last.token_ids))
            edits.append(SlotSwap(slot, freed, length))
        num_tokens = sequence.num_computed_tokens
        is_useful = sequence.can_chunk_prefill and num_tokens >= MIN_REUSED_TOKENS
        if self._retains and sequence.is_reusable and is_useful:
            self._clock += 1
            self._free.insert(0, Retained(sequence.token_ids[:num_tokens], self._clock))
        else:
            # A failed step may have written more tokens than were counted.
            edits.append(SlotWipe(freed, 0, len(sequence.token_ids)))
            self._free.insert(0, None)
        return edits


def num_shared_tokens(first: Items[int], second: Items[int], limit: int) -> int:
    """Return the length of the common prefix of two lists, at most `limit`.

    Both lists have at least `limit` tokens. Compares slices, which runs at C speed, and halves the
    differing part, so each token is compared about twice.
    """
    same, differing = 0, limit + 1
    probe = limit
    while same < probe:
        if first[same:probe] == second[same:probe]:
            same = probe
        else:
            differing = probe
        probe = (same + differing) // 2
    return same
