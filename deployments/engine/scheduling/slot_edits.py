"""What is done to the slots' contents between two steps. Carried out in order, by `KVSlots`.

Lengths are counts of tokens of a sequence. A layer that holds fewer does the same to all it has.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotSwap:
    """Exchange the contents of two slots, of which the longer has `length` tokens."""

    first: int
    second: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first `length` tokens of a slot into another, which is clean."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotWipe:
    """Zero the tokens `start` .. `end`-1 of a slot."""

    slot: int
    start: int
    end: int


SlotEdit = SlotSwap | SlotCopy | SlotWipe
