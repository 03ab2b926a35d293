"""The few sizes that decode steps are padded to, so that each can be captured once.

A captured step has a fixed number of rows and reads a fixed number of tokens for each. Rows
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
        num_rows: Rows, some of which may be padding.
        read_length: Tokens that each row reads, in layers that keep that many.
    """

    num_rows: int
    read_length: int


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """All sizes of decode steps.

    Attributes:
        max_rows: The most rows of a step.
        max_length: The largest capacity of any layer, in tokens.
    """

    max_rows: int
    max_length: int

    def cover(self, num_rows: int, length: int) -> DecodeBucket:
        """Return the smallest size that holds `num_rows` rows of at most `length` tokens each."""
        return DecodeBucket(
            min(_round_rows(num_rows), self.max_rows),
            min(_round_length(length), self.max_length),
        )

    @property
    def num_sizes(self) -> int:
        """The number of different sizes."""
        num_batches = len({self.cover(n, 1).num_rows for n in range(1, self.max_rows + 1)})
        num_lengths, length = 1, SHORTEST_READ
        while length < self.max_length:
            num_lengths, length = num_lengths + 1, 2 * length
        return num_batches * num_lengths


def _round_rows(num_rows: int) -> int:
    small = next((size for size in SMALL_BATCHES if num_rows <= size), None)
    return small or -(-num_rows // BATCH_STEP) * BATCH_STEP


def _round_length(length: int) -> int:
    return max(SHORTEST_READ, 1 << (length - 1).bit_length())
