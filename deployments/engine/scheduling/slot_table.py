"""Which slot holds whose keys and values, and what of them a new sequence can start from.

Owns the slots' occupancy. It decides and returns the edits that make the slots follow: no tensors.

The running sequences always hold the slots 0 .. n-1, so that decoding reads views: when one ends,
the last running one trades places with it. Each of the other slots is clean, or it retains what a
sequence left behind that ended well. A new sequence whose tokens begin like those of a running
sequence or of a retained slot takes over the keys and values of that prefix instead of computing
them. The slot for it is a clean one, else the retained one that was not used for longest.

Keys and values depend on nothing but the tokens up to their own position, so a prefix is known by
its token ids. Images are not among those: a sequence with images neither gives nor takes. And since
no mask hides a NaN, a token that gives one spoils what was prefilled together with it. So only
those give who are past their prefill: their logits, which depend on all that they hold, were
finite. Nor does anybody give whose last pass has failed, since it may have written more than was
counted.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from deployments.engine.sequence import Sequence, SequenceState
from deployments.engine.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe

MIN_REUSED_TOKENS = 16
"""Shorter prefixes are not worth a copy or a wait: unrelated prompts share the first words of a
chat template, and so few tokens join a step's prefill at hardly any cost."""


@dataclass(slots=True)
class Retained:
    """What a sequence left in its slot: these tokens' keys and values.

    Attributes:
        token_ids: The tokens.
        last_used: When a sequence last ended in the slot or took a prefix from it, in the table's
            own count of such events.
    """

    token_ids: list[int]
    last_used: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a sequence, as it stands in a slot."""

    slot: int
    num_tokens: int


class SlotTable:
    """Running sequences, and behind them what the free slots retain."""

    def __init__(self, *, num_slots: int, unwrapped_length: int, retains: bool) -> None:
        """Start with clean slots.

        Args:
            num_slots: Number of slots.
            unwrapped_length: Tokens up to which a slot holds all of its sequence; a longer one has
                lost, in layers with a sliding window, what lies before the window.
            retains: Whether slots keep and share prefixes.
        """
        self.running: list[Sequence] = []
        self._free: list[Retained | None] = [None] * num_slots
        self._unwrapped_length = unwrapped_length
        self._retains = retains
        self._clock = 0

    @property
    def has_room(self) -> bool:
        """Whether another sequence can be admitted."""
        return bool(self._free)

    @property
    def num_tokens_by_slot(self) -> tuple[int, ...]:
        """For each slot how many tokens it may hold: a running sequence's, or those retained."""
        retained = (0 if free is None else len(free.token_ids) for free in self._free)
        return (*(len(sequence.token_ids) for sequence in self.running), *retained)

    def slot_of(self, sequence: Sequence) -> int | None:
        """Return the slot of a running sequence, None for any other."""
        return next((i for i, other in enumerate(self.running) if other is sequence), None)

    def find_prefix(self, sequence: Sequence) -> Prefix | None:
        """Return the longest prefix that a slot could give a sequence now.

        It leaves at least one token to compute, since only that yields logits.
        """
        best: Prefix | None = None
        if self._retains and sequence.is_divisible:
            wanted, longest = sequence.token_ids, MIN_REUSED_TOKENS - 1
            limit = len(wanted) - 1
            for slot, token_ids, num_tokens in self._donors():
                end = min(limit, num_tokens)
                if end <= longest or not self._stands(end, num_tokens):
                    continue
                # One glance at the first token that would make it longer spares most comparisons.
                if token_ids[longest] != wanted[longest]:
                    continue
                shared = num_shared_tokens(token_ids, wanted, end)
                if shared > longest and self._stands(shared, num_tokens):
                    best, longest = Prefix(slot, shared), shared
        return best

    def _donors(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield each donor's slot, its token ids, and how many of them the slot holds."""
        for slot, retained in enumerate(self._free, start=len(self.running)):
            if retained is not None:
                yield slot, retained.token_ids, len(retained.token_ids)
        for slot, other in enumerate(self.running):
            is_past_prefill = other.state is SequenceState.DECODING
            if is_past_prefill and other.is_divisible and not other.has_strays:
                yield slot, other.token_ids, other.num_computed_tokens

    def _stands(self, num_wanted: int, num_held: int) -> bool:
        """Return whether a slot of num_held tokens still has what follows num_wanted of them needs.

        A ring that has come round holds the window of its newest token. That is what the next token
        needs, and what the newest one needs if it is computed again, but no earlier one.
        """
        limit = self._unwrapped_length
        return num_held <= limit or num_wanted >= num_held - 1

    def is_prefix_coming(self, sequence: Sequence, found: Prefix | None) -> bool:
        """Return whether a sequence that is being prefilled will soon have more to give.

        Whoever is prefilling has gone first all along, so waiting for it costs one step or so. And
        nobody waits for ever: the first of them gets on with it in every step, or is gone.
        """
        if not self._retains or not sequence.is_divisible:
            return False
        worth_waiting = (found.num_tokens if found else 0) + MIN_REUSED_TOKENS
        return any(
            self._will_share(other, sequence.token_ids, worth_waiting)
            for other in self.running
            if other.state is SequenceState.PREFILLING and other.is_divisible
        )

    def _will_share(self, other: Sequence, wanted: list[int], num_tokens: int) -> bool:
        """Return whether another sequence, once prefilled, can give at least so many tokens."""
        num_held = len(other.token_ids)
        if not self._stands(num_tokens, num_held):
            num_tokens = num_held - 1
        if num_tokens > min(len(wanted) - 1, num_held):
            return False
        return other.token_ids[:num_tokens] == wanted[:num_tokens]

    def admit(self, sequence: Sequence, prefix: Prefix | None) -> list[SlotEdit]:
        """Give a sequence the first free slot, with a prefix that `find_prefix` has found.

        Returns:
            What puts the prefix, and zeros behind it, into the slot.
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
            # The donor may have been the first of the free slots, which has traded places.
            source = slot + index if donor == 0 else prefix.slot
            edits.append(SlotCopy(source, slot, prefix.num_tokens))
            self._touch(source)
        return edits

    def _is_consumed(self, prefix: Prefix, donor: int) -> bool:
        """Return whether taking a prefix leaves nothing in a retained slot that is worth keeping.

        Args:
            prefix: What is taken.
            donor: Index of the slot among the free ones; negative for one that runs.
        """
        retained = self._free[donor] if donor >= 0 else None
        return (
            retained is not None and len(retained.token_ids) - prefix.num_tokens < MIN_REUSED_TOKENS
        )

    def _victim(self, donor: int | None) -> int:
        """Return which free slot a new sequence takes: the donor's own only if it is the last."""

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
        """Take a running sequence's slot from it.

        Returns:
            What closes the gap and, unless the slot is retained, leaves it clean.
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
        is_useful = sequence.is_divisible and num_tokens >= MIN_REUSED_TOKENS
        if self._retains and sequence.is_sound and is_useful:
            self._clock += 1
            self._free.insert(0, Retained(sequence.token_ids[:num_tokens], self._clock))
        else:
            # A step that failed may have written more than was counted.
            edits.append(SlotWipe(freed, 0, len(sequence.token_ids)))
            self._free.insert(0, None)
        return edits


def num_shared_tokens(first: Items[int], second: Items[int], limit: int) -> int:
    """Return how many of the first `limit` tokens two lists share.

    Compares slices, which runs at C speed, and halves the part that differs, so it looks at each
    token about twice. Both lists have at least `limit` tokens.
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
