"""The few sizes that decode steps are padded to, so that each can be captured once.

A captured step has a fixed number of rows and reads a fixed number of tokens from each slot. Rows
are rounded up to 1, 2, 4 or a multiple of 8. Tokens are rounded up to powers of two: reading a
layer's keys twice takes less time than a step's launches.
"""

from dataclasses import dataclass

SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 8
SHORTEST_READ = 256

MAX_GRAPHS = 64
"""How many captured steps are kept: the most recently used. A server with many long sequences could
meet some hundred sizes, but only a few at any one time."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """One size of decode steps.

    Attributes:
        num_rows: Rows; row i belongs to slot i.
        read_length: Tokens that each row reads from its slot, in layers that hold that many.
    """

    num_rows: int
    read_length: int


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """All sizes of decode steps for a set of slots.

    Attributes:
        num_slots: The number of slots, which is the most rows of a step.
        max_length: The largest capacity of any layer, in tokens.
    """

    num_slots: int
    max_length: int

    def cover(self, num_rows: int, length: int) -> DecodeBucket:
        """Return the smallest size that holds rows 0 .. num_rows-1, each of at most `length`."""
        return DecodeBucket(
            min(_round_rows(num_rows), self.num_slots),
            min(_round_length(length), self.max_length),
        )

    @property
    def num_sizes(self) -> int:
        """The number of different sizes."""
        num_batches = len({self.cover(n, 1).num_rows for n in range(1, self.num_slots + 1)})
        num_lengths, length = 1, SHORTEST_READ
        while length < self.max_length:
            num_lengths, length = num_lengths + 1, 2 * length
        return num_batches * num_lengths


def _round_rows(num_rows: int) -> int:
    small = next((size for size in SMALL_BATCHES if num_rows <= size), None)
    return small or -(-num_rows // BATCH_STEP) * BATCH_STEP


def _round_length(length: int) -> int:
    return max(SHORTEST_READ, 1 << (length - 1).bit_length())
