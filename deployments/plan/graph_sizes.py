"""The few sizes that decode steps are padded to, so that each can be captured once.

A captured step has a fixed number of rows: 1, 2, 4, then every 8th, from 128 on every 16th, and
from 256 on every 32nd. If rows read their extents by length, that is all. Otherwise they read masks
of a fixed length, too, rounded up to powers of two: reading a layer's keys twice takes less time
than a step's launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 8
EVEN_BATCHES = 16
"""Batches are rounded up to about a sixteenth of their rows, so that 512 rows have 35 sizes."""

SHORTEST_READ = 256

MIXED_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""The tokens of captured steps with prompts. On an H100, launching a step of a 7B model from Python
took 14 to 18 ms, as long as it computes some 1,000 tokens."""

MAX_GRAPHS = 64
"""How many captured steps are kept: the most recently used. A server with many long sequences could
meet some hundred sizes if rows read masks, but only a few at any one time."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """One size of decode steps.

    Attributes:
        num_rows: Rows, some of which may be padding.
        read_length: The most tokens that a row reads, in layers that keep that many.
    """

    num_rows: int
    read_length: int


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """All sizes of decode steps.

    Attributes:
        max_rows: The most rows of a step.
        max_length: The largest capacity of any layer, in tokens.
        is_by_length: Whether rows read their extents by length, so that one length serves all.
    """

    max_rows: int
    max_length: int
    is_by_length: bool = False

    def cover(self, num_rows: int, length: int) -> DecodeBucket:
        """Return the smallest size that holds `num_rows` rows of at most `length` tokens each."""
        return DecodeBucket(
            min(_round_rows(num_rows), self.max_rows),
            self.max_length if self.is_by_length else min(_round_length(length), self.max_length),
        )

    def with_length(self, length: int) -> list[DecodeBucket]:
        """Return all sizes for sequences of at most `length` tokens, the largest first."""
        sizes = {self.cover(n, length) for n in range(1, self.max_rows + 1)}
        return sorted(sizes, key=lambda size: size.num_rows, reverse=True)

    @property
    def num_sizes(self) -> int:
        """The number of different sizes."""
        num_batches = len(self.with_length(1))
        if self.is_by_length:
            return num_batches
        num_lengths, length = 1, SHORTEST_READ
        while length < self.max_length:
            num_lengths, length = num_lengths + 1, 2 * length
        return num_batches * num_lengths


def mixed_sizes(max_batched_tokens: int) -> Sequence[int]:
    """Return the tokens of each captured step with prompts, the largest first."""
    smaller = sum(size < max_batched_tokens for size in MIXED_SIZES)
    return MIXED_SIZES[smaller::-1]


def _round_rows(num_rows: int) -> int:
    small = next((size for size in SMALL_BATCHES if num_rows <= size), None)
    if small:
        return small
    step = max(BATCH_STEP, (1 << (num_rows - 1).bit_length()) // EVEN_BATCHES)
    return -(-num_rows // step) * step


def _round_length(length: int) -> int:
    return max(SHORTEST_READ, 1 << (length - 1).bit_length())
