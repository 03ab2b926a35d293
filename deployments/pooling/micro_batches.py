"""Chooses the sequences of the next micro-batch.

A micro-batch is bounded by the tokens that the device computes, not by the number of sequences: 64
short texts cost as much as one long text. Packed sequences cost their own tokens; padded ones each
cost as much as the longest of the batch. But packed sequences are laid out with padding for the
model's head, so the number of short texts batched with a long one is limited too.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Sized(Protocol):
    """An item with a number of tokens."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        ...


Item = TypeVar("Item", bound=Sized)

MAX_LAID_OUT = 8
"""Limit on the padded layout of a packed micro-batch, as a multiple of `max_tokens`. With padding,
a text of 1024 tokens and 341 of three are 171 times as many tokens, a gigabyte of hidden states in
RoBERTa-base; texts of 100 to 800 characters are twice as many."""


def in_order(items: Iterable[Item], *, is_padded: bool) -> list[Item]:
    """Return the items of one sweep in the order in which they run.

    Packed items keep their order, oldest first. Padded items are sorted by length, since neighbours
    of equal length need no padding.
    """
    return sorted(items, key=lambda item: item.num_tokens) if is_padded else list(items)


def take_batch(
    sweeps: Iterable[deque[Item]],
    max_tokens: int,
    *,
    is_padded: bool,
    is_wanted: Callable[[Item], bool],
) -> list[Item]:
    """Take the next micro-batch from the left of sweeps; it is empty if nothing is left.

    Args:
        sweeps: Items sorted by `in_order`; those of the first sweep go first. Items that are no
            longer wanted are dropped on the way.
        max_tokens: The most tokens to compute together; a packed layout may have `MAX_LAID_OUT`
            times as many with its padding. A longer sequence runs by itself.
        is_padded: Whether each item costs as much as the longest.
        is_wanted: Returns whether a client still waits for an item.
    """
    batch: list[Item] = []
    total = longest = 0
    for sweep in sweeps:
        while sweep:
            item = sweep[0]
            if is_wanted(item):
                longest = max(longest, item.num_tokens)
                total += item.num_tokens
                num_padded = longest * (len(batch) + 1)
                cost = num_padded if is_padded else max(total, num_padded / MAX_LAID_OUT)
                if batch and cost > max_tokens:
                    return batch
                batch.append(item)
            sweep.popleft()
    return batch
