"""Where the rows of a step store their tokens, and which extents they read, on a GPU.

Rows are stored first; then decode rows attend in one call, and chunks in another. Both read the
extents in place (`ExtentReads`). Only a chunk that outgrows a window reads copies: its end would
overwrite tokens that its beginning sees. In such a step the chunks of those layers read the ring's
older tokens and their own, joined in the order of their positions.

All numbers of a step go to the device in one copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from deployments.compute.host_to_device import to_device
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.varlen_reads import ExtentReads

Starts = tuple[int, ...]
"""The first token of a sequence's extent in each group."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A prefill chunk's place among the packed rows, in its sequence and in the KV memory."""

    first_row: int
    starts: Starts
    start: int
    end: int

    @property
    def rows(self) -> slice:
        """The chunk's rows."""
        return slice(self.first_row, self.first_row + self.end - self.start)


@dataclass(frozen=True, slots=True)
class JoinedTokens:
    """Copies that chunks read: older tokens of their rings, and their own.

    Attributes:
        tails: [t], int64, the places of the older tokens in the layer, chunk after chunk.
        order: [t + m], int64, where each token of each chunk is among the t older ones and then the
            m own ones; None if they are in order.
    """

    tails: torch.Tensor
    order: torch.Tensor | None

    def join(self, stored: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return what the chunks read: [t + m, num_kv_heads, head_dim].

        Args:
            stored: The layer's keys or values.
            own: [m, num_kv_heads, head_dim], those of all chunks.
        """
        joined = torch.cat([stored.index_select(0, self.tails), own])
        return joined if self.order is None else joined.index_select(0, self.order)


@dataclass(frozen=True, slots=True)
class StepReads:
    """What the rows of a step store and read, in layers of one capacity.

    Attributes:
        places: [n], int64, where each row's token is stored; the spare token for one that leaves
            its window within the step.
        decode: The reads of the decode rows; None if there are none.
        chunks: The reads of the chunks; None if there are none.
        joined: The copies that the chunks read; None if they read their extents.
    """

    places: torch.Tensor
    decode: ExtentReads | None
    chunks: ExtentReads | None = None
    joined: JoinedTokens | None = None


class StepNumbers:
    """Lists of numbers, sent to the device in one copy.

    Attributes:
        wide: The numbers on the device, int64.
        narrow: The same, int32.
    """

    def __init__(self) -> None:
        """Start without numbers."""
        self._numbers: list[int] = []
        self.wide = self.narrow = torch.empty(0)

    def add(self, numbers: Iterable[int]) -> slice:
        """Add a list; return where its numbers will be."""
        first = len(self._numbers)
        self._numbers += numbers
        return slice(first, len(self._numbers))

    def send(self, device: torch.device) -> None:
        """Send all lists to the device."""
        self.wide = to_device(self._numbers, device, torch.int64)
        self.narrow = self.wide.int()


@dataclass(frozen=True, slots=True)
class _ReadLists:
    """`ExtentReads` whose tensors are still lists of a `StepNumbers`."""

    query_starts: slice
    starts: slice
    lengths: slice
    most_queries: int
    longest: int
    window: int | None = None

    @classmethod
    def of(
        cls,
        numbers: StepNumbers,
        counts: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        window: int | None = None,
    ) -> "_ReadLists":
        """Add the reads of sequences with these numbers of queries."""
        return cls(
            numbers.add(accumulate(counts, initial=0)),
            numbers.add((*starts, 0)),
            numbers.add(lengths),
            max(counts),
            max(lengths),
            window,
        )

    def on_device(self, numbers: StepNumbers) -> ExtentReads:
        query_starts, starts, lengths = (
            numbers.narrow[part] for part in (self.query_starts, self.starts, self.lengths)
        )
        return ExtentReads(
            query_starts, starts, lengths, self.most_queries, self.longest, self.window
        )


class _Planned:
    """The numbers of `StepReads`, for layers of one capacity."""

    def __init__(
        self,
        kv: KVCache,
        capacity: int,
        rows: Sequence[Starts],
        positions: Sequence[int],
        chunks: Sequence[ChunkRows],
        numbers: StepNumbers,
    ) -> None:
        """Add the numbers of a step; see `send_reads`."""
        group = kv.group_of(capacity)
        starts = [row[group] for row in rows]
        self._places = numbers.add(places_of(kv, capacity, rows, positions, chunks))
        self._decode: _ReadLists | None = None
        self._chunks: _ReadLists | None = None
        self._tails: slice | None = None
        self._order: slice | None = None
        if rows:
            # A full ring holds exactly the window of its newest token.
            lengths = [min(position + 1, capacity) for position in positions]
            self._decode = _ReadLists.of(numbers, (1,) * len(rows), starts, lengths)
        if chunks and max(chunk.end for chunk in chunks) <= capacity:
            self._chunks = _ReadLists.of(
                numbers,
                [chunk.end - chunk.start for chunk in chunks],
                [chunk.starts[group] for chunk in chunks],
                [chunk.end for chunk in chunks],
            )
        elif chunks:
            self._join(chunks, group, capacity, numbers)

    def _join(
        self, chunks: Sequence[ChunkRows], group: int, capacity: int, numbers: StepNumbers
    ) -> None:
        """Add the numbers of chunks that read copies."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        # The first query also sees itself.
        tails = [min(chunk.start, capacity - 1) for chunk in chunks]
        self._tails = numbers.add(
            chunk.starts[group] + position % capacity
            for chunk, num in zip(chunks, tails, strict=True)
            for position in range(chunk.start - num, chunk.start)
        )
        if len(chunks) > 1:
            tail_ends = accumulate(tails, initial=0)
            own_ends = accumulate(counts, initial=sum(tails))
            self._order = numbers.add(
                place
                for (tail, tail_end), (own, own_end) in zip(
                    pairwise(tail_ends), pairwise(own_ends), strict=True
                )
                for place in (*range(tail, tail_end), *range(own, own_end))
            )
        lengths = [num + count for num, count in zip(tails, counts, strict=True)]
        starts = list(accumulate(lengths, initial=0))[:-1]
        self._chunks = _ReadLists.of(numbers, counts, starts, lengths, window=capacity)

    def on_device(self, numbers: StepNumbers) -> StepReads:
        """Return the reads, once the numbers are sent."""
        return StepReads(
            numbers.wide[self._places],
            None if self._decode is None else self._decode.on_device(numbers),
            None if self._chunks is None else self._chunks.on_device(numbers),
            None
            if self._tails is None
            else JoinedTokens(
                numbers.wide[self._tails],
                None if self._order is None else numbers.wide[self._order],
            ),
        )


def places_of(
    kv: KVCache,
    capacity: int,
    rows: Sequence[Starts],
    positions: Sequence[int],
    chunks: Sequence[ChunkRows],
) -> list[int]:
    """Return where each row's token is stored in layers of one capacity; see `send_reads`."""
    group = kv.group_of(capacity)
    places = [
        row[group] + position % capacity for row, position in zip(rows, positions, strict=True)
    ]
    for chunk in chunks:
        places += _places(chunk, chunk.starts[group], capacity, kv.spare_tokens[group])
    return places


def _places(chunk: ChunkRows, start: int, capacity: int, spare_token: int) -> Iterable[int]:
    """Return the places of a chunk's tokens; only the last that fit are kept."""
    if chunk.end <= capacity:
        return range(start + chunk.start, start + chunk.end)
    first = chunk.end - capacity
    return (
        start + position % capacity if position >= first else spare_token
        for position in range(chunk.start, chunk.end)
    )


def send_reads(
    kv: KVCache,
    rows: Sequence[Starts],
    positions: Sequence[int],
    chunks: Sequence[ChunkRows],
    others: Sequence[Sequence[int]] = (),
) -> tuple[dict[int, StepReads], list[torch.Tensor]]:
    """Return the reads of a step by capacity, and other lists as tensors, int64.

    Args:
        kv: The KV cache.
        rows: The extents of each decode row.
        positions: The position of each decode row's token in its sequence.
        chunks: The prefill chunks.
        others: Lists of numbers that the device needs too.
    """
    numbers = StepNumbers()
    planned = {
        capacity: _Planned(kv, capacity, rows, positions, chunks, numbers)
        for capacity in kv.layout.capacities
    }
    parts = [numbers.add(other) for other in others]
    numbers.send(kv.device)
    reads = {capacity: each.on_device(numbers) for capacity, each in planned.items()}
    return reads, [numbers.wide[part] for part in parts]
