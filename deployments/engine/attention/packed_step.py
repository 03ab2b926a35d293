"""The slot and position of each row of a packed step, and the tokens that it may see.

The model runner makes one `PackedStep` per step; every layer's attention reads it. Layers of the
same capacity share places and masks, so these are computed once and kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch

from deployments.compute.cpu.attention.slot_rows import SlotRows
from deployments.compute.host_to_device import to_device
from deployments.engine.attention.decode_spans import CALL_COST_BYTES, RowSpan, split_rows
from deployments.engine.attention.kv_slots import KVSlots

if TYPE_CHECKING:
    from deployments.engine.attention.varlen_reads import SlotReads

READ_BUCKET = 64
"""A decode row reads its sequence's length rounded up to a multiple of this, so that kernels and
masks have few different shapes."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A prefill chunk's place among the packed rows, in its sequence and in the slots."""

    first_row: int
    slot: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        """The chunk's rows."""
        return slice(self.first_row, self.first_row + self.end - self.start)


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Decode rows that attend in one call.

    Attributes:
        rows: The rows, m of them.
        slots: Their slots, which are adjacent.
        read_length: Tokens that the rows read from their slots.
        mask: [m, 1, 1, read_length], bool: which of them each row sees; None if every row sees all.
    """

    rows: slice
    slots: slice
    read_length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """The places where decode rows write and the lengths that they read, in layers of one capacity.

    Attributes:
        slots: [num_decode], int64, the slot of each row.
        indices: [num_decode], int64, the place of each row's own token in its slot.
        lengths: How many tokens of its slot each row sees, its own included; empty if only the
            device knows.
        rows: The same for the CPU's kernel; None if there are no lengths.
    """

    slots: torch.Tensor
    indices: torch.Tensor
    lengths: tuple[int, ...] = ()
    rows: SlotRows | None = None


@dataclass(frozen=True, slots=True)
class RowRun:
    """Neighbouring rows that attend in one call of the CPU's kernel.

    Attributes:
        rows: The rows.
        seen: Where they write, and how far they read.
        chunks: Those of their chunks that must be stored before; empty if the rows run in order.
        in_order: Whether a row overwrites a token that an earlier one sees.
    """

    rows: slice
    seen: SlotRows
    chunks: tuple[ChunkRows, ...]
    in_order: bool

    @classmethod
    def of(
        cls,
        first: int,
        slots: Sequence[int],
        positions: Sequence[int],
        capacity: int,
        chunks: tuple[ChunkRows, ...] | None = None,
    ) -> Self:
        """Return rows from `first` on, at these slots and positions; in order without chunks."""
        indices = [position % capacity for position in positions]
        # A full ring holds exactly the window of its newest token.
        lengths = [min(position + 1, capacity) for position in positions]
        seen = SlotRows.of(slots, indices, lengths)
        return cls(slice(first, first + len(slots)), seen, chunks or (), chunks is None)


@dataclass(slots=True)
class PackedStep:
    """The rows of one step. Decode rows come first.

    Attributes:
        kv: The slots of all layers.
        decode_slots: The slot of each decode row.
        decode_positions: The position of each decode row's token in its sequence.
        chunks: The prefill chunks.
        visited_layers: Layers that attended in this step.
    """

    kv: KVSlots
    decode_slots: tuple[int, ...]
    decode_positions: tuple[int, ...]
    chunks: tuple[ChunkRows, ...]
    visited_layers: set[int] = field(default_factory=set)
    _decode_places: dict[int, DecodePlaces] = field(default_factory=dict)
    _decode_spans: dict[int, tuple[DecodeSpan, ...]] = field(default_factory=dict)
    _chunk_masks: dict[tuple[ChunkRows, int], torch.Tensor | None] = field(default_factory=dict)
    _row_runs: dict[int, tuple[RowRun, ...]] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        """The number of decode rows."""
        return len(self.decode_slots)

    def decode_places(self, capacity: int) -> DecodePlaces:
        """Return where the decode rows write and read in layers of this capacity."""
        places = self._decode_places.get(capacity)
        if places is None:
            places = self._decode_places[capacity] = self._place(capacity)
        return places

    def store_decode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the decode rows' keys and values: [num_decode, num_kv_heads, head_dim] each."""
        places = self.decode_places(self.kv.capacities[layer])
        self.kv.write_rows(layer, places.slots, places.indices, keys, values)

    def _place(self, capacity: int) -> DecodePlaces:
        device = self.kv.device
        positions = self.decode_positions
        # A full ring holds exactly the window of its newest token.
        lengths = tuple(min(position + 1, capacity) for position in positions)
        indices = [position % capacity for position in positions]
        return DecodePlaces(
            to_device(self.decode_slots, device, torch.int64),
            to_device(indices, device, torch.int64),
            lengths,
            SlotRows.of(self.decode_slots, indices, lengths),
        )

    def decode_reads(self, capacity: int) -> "SlotReads | None":
        """Return how far each row reads its slot; None unless rows read by length."""
        return None

    def row_runs(self, capacity: int) -> tuple[RowRun, ...]:
        """Return all rows in the form that the CPU's kernel reads, in order.

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
        slots, positions = [*self.decode_slots], [*self.decode_positions]
        first, chunks = 0, list[ChunkRows]()
        for chunk in self.chunks:
            if chunk.end > capacity:
                if slots:
                    yield RowRun.of(first, slots, positions, capacity, tuple(chunks))
                own = range(chunk.start, chunk.end)
                yield RowRun.of(chunk.first_row, [chunk.slot] * len(own), own, capacity)
                slots, positions, chunks = [], [], []
                first = chunk.rows.stop
            else:
                slots += [chunk.slot] * (chunk.end - chunk.start)
                positions += range(chunk.start, chunk.end)
                chunks.append(chunk)
        if slots:
            yield RowRun.of(first, slots, positions, capacity, tuple(chunks))

    def decode_spans(self, capacity: int) -> tuple[DecodeSpan, ...]:
        """Return the decode rows' attention calls in order, each padded to its longest row."""
        spans = self._decode_spans.get(capacity)
        if spans is None:
            spans = self._decode_spans[capacity] = tuple(self._split(capacity))
        return spans

    def _split(self, capacity: int) -> Iterator[DecodeSpan]:
        lengths = self.decode_places(capacity).lengths
        padded = [min(-(-n // READ_BUCKET) * READ_BUCKET, capacity) for n in lengths]
        call_cost = CALL_COST_BYTES[self.kv.device.type] / self.kv.shape.bytes_per_layer_token
        for span in split_rows(self.decode_slots, padded, call_cost):
            yield self._span(span, lengths[span.first : span.end])

    def _span(self, span: RowSpan, lengths: tuple[int, ...]) -> DecodeSpan:
        rows = slice(span.first, span.end)
        mask = None
        if min(lengths) < span.read_length:
            seen = to_device(lengths, self.kv.device, torch.int64)[:, None]
            places = torch.arange(span.read_length, device=self.kv.device)
            mask = (places < seen)[:, None, None]
        first_slot = self.decode_slots[span.first]
        slots = slice(first_slot, first_slot + span.end - span.first)
        return DecodeSpan(rows, slots, span.read_length, mask)

    def chunk_mask(self, chunk: ChunkRows, capacity: int) -> torch.Tensor | None:
        """Return which tokens of the slot and of the chunk itself a chunk's queries see.

        Args:
            chunk: One of the chunks.
            capacity: Tokens that the layer holds, which is also the most that a query sees.

        Returns:
            [m, t + m], bool, for the t tokens that `KVSlots.joined` puts before the chunk's m; None
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
