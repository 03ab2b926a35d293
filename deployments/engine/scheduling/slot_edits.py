"""Edits of the slots' contents between two steps; `KVSlots` applies them in order.

Lengths count a sequence's tokens. A layer that holds fewer applies the edit to all that it holds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotSwap:
    """Exchange the contents of two slots; the longer one has `length` tokens."""

    first: int
    second: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first `length` tokens of a slot into a clean one."""

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
