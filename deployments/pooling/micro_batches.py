"""Chooses the sequences of the next sweep, and of the next micro-batch.

A sweep is made of turns: of all requests, oldest first, each gives a few texts, and then its next
ones once all others had their turn. So a text in a hundred pieces holds the short ones that come
meanwhile for a piece or two of each sweep, and nobody waits for longer than a sweep.

A micro-batch is bounded by the tokens that the device computes, not by the number of sequences: 64
short texts cost as much as one long text. Packed sequences cost their own tokens; padded ones each
cost as much as the longest of the batch. But packed sequences are laid out with padding for the
model's head, so the number of short texts batched with a long one is limited too.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


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


class RoundRobin(Generic[Item]):
    """The items of requests that are not in a sweep yet, all of one tenant and priority."""

    def __init__(self, max_tokens: int) -> None:
        """Start empty.

        Args:
            max_tokens: The most tokens that a request gives in one turn, unless one item has more.
        """
        self._max_tokens = max_tokens
        self._rests: list[deque[Item]] = []  # of each request, oldest first; none empty

    def __bool__(self) -> bool:
        """Return whether items are left."""
        return bool(self._rests)

    def add(self, items: Iterable[Item]) -> None:
        """Add the items of a request, which is the newest."""
        if rest := deque(items):
            self._rests.append(rest)

    def take(
        self, min_tokens: int, full_tokens: int, is_wanted: Callable[[Item], bool]
    ) -> list[Item]:
        """Take turns until they have `full_tokens`, or `min_tokens` and the last of a request.

        As long as no request is complete, none would be answered sooner if fewer were taken.

        Args:
            min_tokens: Fewer are taken only if there are no more; at least 1.
            full_tokens: At least `min_tokens`.
            is_wanted: Returns whether a client still waits for an item. A request is dropped at its
                first item that nobody waits for.
        """
        taken: list[Item] = []
        num_tokens, wanted_tokens = 0, full_tokens
        while self._rests and num_tokens < wanted_tokens:
            self._rests = [rest for rest in self._rests if is_wanted(rest[0])]
            for rest in self._rests:
                turn = self._turn_of(rest)
                taken += turn
                num_tokens += sum(item.num_tokens for item in turn)
            if not all(self._rests):
                wanted_tokens = min_tokens
                self._rests = [rest for rest in self._rests if rest]
        return taken

    def _turn_of(self, rest: deque[Item]) -> list[Item]:
        """Take what a request gives in one turn, from the left of its rest."""
        turn = [rest.popleft()]
        num_left = self._max_tokens - turn[0].num_tokens
        while rest and (num_left := num_left - rest[0].num_tokens) >= 0:
            turn.append(rest.popleft())
        return turn


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
