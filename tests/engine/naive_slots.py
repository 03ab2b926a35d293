"""Slots without tensors that keep the token at each position."""

from collections.abc import Iterable

from deployments.engine.scheduling.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe
from deployments.engine.scheduling.slot_table import MIN_REUSED_TOKENS


class NaiveSlots:
    """Each slot's contents, token by token: one layer without a window and one with a ring.

    Image tokens are written as strings, since their placeholder ids don't identify the image.
    """

    def __init__(self, *, num_slots: int, length: int, capacity: int) -> None:
        self.capacity = capacity
        self.whole: list[list[object]] = [[None] * length for _ in range(num_slots)]
        self.rings: list[list[object]] = [[None] * capacity for _ in range(num_slots)]

    def apply(self, edits: Iterable[SlotEdit]) -> None:
        for edit in edits:
            for rows in (self.whole, self.rings):
                match edit:
                    case SlotSwap(first, second, n):
                        rows[first][:n], rows[second][:n] = rows[second][:n], rows[first][:n]
                    case SlotCopy(source, target, n):
                        rows[target][:n] = rows[source][:n]
                    case SlotWipe(slot, start, end):
                        for i in range(start, min(end, len(rows[slot]))):
                            rows[slot][i] = None

    def write(self, slot: int, position: int, token: object) -> None:
        self.whole[slot][position] = token
        self.rings[slot][position % self.capacity] = (position, token)

    def gives(self, slot: int, token_ids: list[int]) -> bool:
        """Return whether a slot holds the whole context of the token after these."""
        num_tokens = len(token_ids)
        seen = range(max(0, num_tokens - self.capacity + 1), num_tokens)
        return self.whole[slot][:num_tokens] == token_ids and all(
            self.rings[slot][p % self.capacity] == (p, token_ids[p]) for p in seen
        )

    def longest_prefix(self, wanted: list[int], slots: set[int]) -> int:
        lengths = range(len(wanted) - 1, MIN_REUSED_TOKENS - 1, -1)
        return next((n for n in lengths if any(self.gives(s, wanted[:n]) for s in slots)), 0)

    def is_clean_after(self, slot: int, num_tokens: int) -> bool:
        ring = self.rings[slot][num_tokens:]
        return all(token is None for token in (*self.whole[slot][num_tokens:], *ring))
