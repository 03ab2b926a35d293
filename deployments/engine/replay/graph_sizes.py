"""The few sizes that decode steps are padded to, so that each can be captured once.

A captured step has one number of rows and reads one number of places from each slot. Rows are
rounded up to 1, 2, 4 or a multiple of 8; places to powers of two, since twice a layer's keys are
read in less time than a step's launches take.
"""

from dataclasses import dataclass

SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 8
SHORTEST_READ = 256

MAX_GRAPHS = 64
"""Captured steps that are kept at once, the latest used. A server whose sequences are long and many
could meet some hundred sizes, but at any time it meets a few."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """A size of decode steps.

    Attributes:
        num_rows: Rows; row i belongs to slot i.
        read_length: Places that each row reads of its slot, in layers that hold as many.
    """

    num_rows: int
    read_length: int


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """All sizes for slots of one kind.

    Attributes:
        num_slots: Slots; no step has more rows.
        max_length: Places of the layer that holds the most.
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
        """How many sizes there are."""
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
