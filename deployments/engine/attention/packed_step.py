"""The extents and position of each row of a packed step, and the tokens that it may see.

The model runner makes one `PackedStep` per step; every layer's attention reads it. Layers of the
same capacity share places and masks, so these are computed once and kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Self

import torch

from deployments.compute.host_to_device import to_device
from deployments.compute.speedups import KVRows
from deployments.engine.attention.decode_spans import (
    CALL_COST_BYTES,
    MAX_GATHERED_BYTES,
    DecodeSpan,
    RowSpan,
    split_rows,
)
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.step_reads import ChunkRows, Starts, StepReads, send_reads

READ_BUCKET = 64
"""Gathered rows are padded to a multiple of this, so that kernels and masks have few different
shapes."""


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """The places where decode rows write and the lengths that they read, in layers of one capacity.

    Attributes:
        tokens: [num_decode], int64, the place of each row's own token.
        starts: The first token of each row's extent; empty if only the device knows.
        lengths: How many tokens from there each row sees, its own included; empty likewise.
        rows: The same for a kernel that attends in place; None if only the device knows.
    """

    tokens: torch.Tensor
    starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    rows: KVRows | None = None


@dataclass(frozen=True, slots=True)
class RowRun:
    """Neighbouring rows that attend in one call of `attend_rows`.

    Attributes:
        rows: The rows.
        seen: Where they write, and how far they read.
        chunks: Those of their chunks that must be stored before; empty if the rows run in order.
        in_order: Whether a row overwrites a token that an earlier one sees.
    """

    rows: slice
    seen: KVRows
    chunks: tuple[ChunkRows, ...]
    in_order: bool

    @classmethod
    def of(
        cls,
        first: int,
        starts: Sequence[int],
        positions: Sequence[int],
        capacity: int,
        chunks: tuple[ChunkRows, ...] | None = None,
    ) -> Self:
        """Return rows from `first` on, in extents that start there; in order without chunks."""
        indices = [position % capacity for position in positions]
        # A full ring holds exactly the window of its newest token.
        lengths = [min(position + 1, capacity) for position in positions]
        seen = KVRows.of(starts, indices, lengths)
        return cls(slice(first, first + len(starts)), seen, chunks or (), chunks is None)


@dataclass(slots=True)
class PackedStep:
    """The rows of one step. Decode rows come first.

    Attributes:
        kv: The keys and values of all layers.
        decode_starts: The extents of each decode row.
        decode_positions: The position of each decode row's token in its sequence.
        chunks: The prefill chunks.
        decode_shifts: What each decode row's rotary position adds to its position; empty for 0s.
        visited_layers: Layers that attended in this step.
        begin_layer: Called with the index of each layer that is about to attend; None: nothing is.
    """

    kv: KVCache
    decode_starts: tuple[Starts, ...]
    decode_positions: tuple[int, ...]
    chunks: tuple[ChunkRows, ...]
    decode_shifts: tuple[int, ...] = ()
    visited_layers: set[int] = field(default_factory=set)
    begin_layer: Callable[[int], None] | None = None
    _decode_places: dict[int, DecodePlaces] = field(default_factory=dict)
    _decode_spans: dict[int, tuple[DecodeSpan, ...]] = field(default_factory=dict)
    _chunk_masks: dict[tuple[ChunkRows, int], torch.Tensor | None] = field(default_factory=dict)
    _row_runs: dict[int, tuple[RowRun, ...]] = field(default_factory=dict)
    _reads: dict[int, StepReads] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        """The number of decode rows."""
        return len(self.decode_starts)

    @property
    def rotary_positions(self) -> tuple[int, ...]:
        """The rotary position of each decode row's token; see `Sequence.position_shift`."""
        if not any(self.decode_shifts):
            return self.decode_positions
        return tuple(map(add, self.decode_positions, self.decode_shifts))

    def decode_places(self, capacity: int) -> DecodePlaces:
        """Return where the decode rows write and read in layers of this capacity."""
        places = self._decode_places.get(capacity)
        if places is None:
            places = self._decode_places[capacity] = self._place(capacity)
        return places

    def store_decode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the decode rows' keys and values: [num_decode, num_kv_heads, head_dim] each."""
        places = self.decode_places(self.kv.capacities[layer])
        self.kv.write_tokens(layer, places.tokens, keys, values)

    def _place(self, capacity: int) -> DecodePlaces:
        group, positions = self.kv.group_of(capacity), self.decode_positions
        starts = tuple([row[group] for row in self.decode_starts])
        # A full ring holds exactly the window of its newest token.
        lengths = tuple(min(position + 1, capacity) for position in positions)
        indices = [position % capacity for position in positions]
        tokens = list(map(add, starts, indices))
        return DecodePlaces(
            to_device(tokens, self.kv.device, torch.int64),
            starts,
            lengths,
            KVRows.of(starts, indices, lengths),
        )

    def send(self, *others: Sequence[int]) -> list[torch.Tensor]:
        """Send all that `reads` returns to the device, and other lists of numbers, in one copy.

        Args:
            *others: Lists of numbers.

        Returns:
            Those lists, int64, on the device.
        """
        self._reads, sent = send_reads(
            self.kv, self.decode_starts, self.decode_positions, self.chunks, others
        )
        return sent

    def reads(self, capacity: int) -> StepReads:
        """Return what the rows store and read in layers of this capacity, by lengths."""
        if capacity not in self._reads:
            self._reads, _ = send_reads(
                self.kv, self.decode_starts, self.decode_positions, self.chunks
            )
        return self._reads[capacity]

    def row_runs(self, capacity: int) -> tuple[RowRun, ...]:
        """Return all rows in the form that `attend_rows` takes, in order.

        Args:
            capacity: Tokens that the layer holds, which is also the most that a query sees.
        """
        if capacity not in self._row_runs:
            self._row_runs[capacity] = tuple(self._runs(capacity))
        return self._row_runs[capacity]

    def _runs(self, capacity: int) -> Iterator[RowRun]:
        """Yield runs: a chunk whose end overwrites tokens that its beginning sees is one of them.

        Such a chunk's rows must store and attend one after the other, as if they were decoded.
        """
        group = self.kv.group_of(capacity)
        starts = [row[group] for row in self.decode_starts]
        positions = [*self.decode_positions]
        first, chunks = 0, list[ChunkRows]()
        for chunk in self.chunks:
            own = range(chunk.start, chunk.end)
            own_starts = [chunk.starts[group]] * len(own)
            if chunk.end > capacity:
                if starts:
                    yield RowRun.of(first, starts, positions, capacity, tuple(chunks))
                yield RowRun.of(chunk.first_row, own_starts, own, capacity)
                starts, positions, chunks = [], [], []
                first = chunk.rows.stop
            else:
                starts += own_starts
                positions += own
                chunks.append(chunk)
        if starts:
            yield RowRun.of(first, starts, positions, capacity, tuple(chunks))

    def decode_spans(self, capacity: int) -> tuple[DecodeSpan, ...]:
        """Return the decode rows' calls of torch's attention, in order."""
        spans = self._decode_spans.get(capacity)
        if spans is None:
            spans = self._decode_spans[capacity] = tuple(self._split(capacity))
        return spans

    def _split(self, capacity: int) -> Iterator[DecodeSpan]:
        places, token_bytes = self.decode_places(capacity), self.kv.shape.bytes_per_layer_token
        padded = [min(-(-n // READ_BUCKET) * READ_BUCKET, capacity) for n in places.lengths]
        call_cost = CALL_COST_BYTES[self.kv.device.type] / token_bytes
        for span in split_rows(padded, call_cost, MAX_GATHERED_BYTES / token_bytes):
            yield self._span(span, places)

    def _span(self, span: RowSpan, places: DecodePlaces) -> DecodeSpan:
        rows = slice(span.first, span.end)
        if span.end - span.first == 1:
            start, length = places.starts[span.first], places.lengths[span.first]
            return DecodeSpan(rows, slice(start, start + length), None)
        own = [places.starts[rows], places.lengths[rows]]
        starts, lengths = to_device(own, self.kv.device, torch.int64)
        is_padded = min(own[1]) < span.read_length
        return DecodeSpan.gathered(rows, starts, lengths, span.read_length, is_padded=is_padded)

    def chunk_mask(self, chunk: ChunkRows, capacity: int) -> torch.Tensor | None:
        """Return which earlier tokens and which of the chunk itself a chunk's queries see.

        Args:
            chunk: One of the chunks.
            capacity: Tokens that the layer holds, which is also the most that a query sees.

        Returns:
            [m, t + m], bool, for the t tokens that `KVCache.joined` puts before the chunk's m; None
            if no token precedes the chunk and each query sees all up to itself.
        """
        key = chunk, capacity
        if key not in self._chunk_masks:
            self._chunk_masks[key] = _chunk_mask(chunk, capacity, self.kv.device)
        return self._chunk_masks[key]


def _chunk_mask(chunk: ChunkRows, capacity: int, device: torch.device) -> torch.Tensor | None:
    if chunk.start == 0 and chunk.end <= capacity:
        return None
    first = max(0, chunk.start - (capacity - 1))
    queries = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    keys = torch.arange(first, chunk.end, device=device)
    return (keys <= queries) & (keys > queries - capacity)
