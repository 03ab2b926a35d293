"""How many sequences make the next micro-batch.

A micro-batch is bounded by the tokens that the device computes, not by the number of sequences: 64
short texts cost as much as one long one. Sequences that are packed cost what they hold; padded ones
cost as much as the longest among them, each. But what is packed is laid out as if it were padded
for the model's head, so a long text takes only so many short ones along.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What has a number of tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        ...


Item = TypeVar("Item", bound=Sized)

MAX_LAID_OUT = 8
"""Places of a packed micro-batch's layout for each token that it may have. A text of 1024 tokens
among 341 of three would take 171, a gigabyte of hidden states in RoBERTa-base; texts of 100 to 800
characters take two."""


def in_order(items: Iterable[Item], *, is_padded: bool) -> list[Item]:
    """Return all that one sweep has taken, in the order in which it runs.

    What is packed needs no order, so the oldest come first. What is padded goes by length, since
    neighbours of one length need no padding.
    """
    return sorted(items, key=lambda item: item.num_tokens) if is_padded else list(items)


def take_batch(
    waiting: deque[Item], max_tokens: int, *, is_padded: bool, is_wanted: Callable[[Item], bool]
) -> list[Item]:
    """Take the next micro-batch from the left; none is left if it is empty.

    Args:
        waiting: In the order of `in_order`. What is not wanted any more is dropped as it comes.
        max_tokens: Most tokens to compute together, of places in a packed layout `MAX_LAID_OUT`
            times as many. A sequence that is longer runs alone.
        is_padded: Whether each counts as long as the longest.
        is_wanted: Whether somebody waits for a sequence.
    """
    batch: list[Item] = []
    total = longest = 0
    while waiting:
        item = waiting[0]
        if is_wanted(item):
            longest = max(longest, item.num_tokens)
            total += item.num_tokens
            num_places = longest * (len(batch) + 1)
            cost = num_places if is_padded else max(total, num_places / MAX_LAID_OUT)
            if batch and cost > max_tokens:
                break
            batch.append(item)
        waiting.popleft()
    return batch
