"""A decode step of fixed size, captured once and replayed for every later step of that size.

Captured kernels always get the same arguments, so the values that change from step to step (where
rows write, how far they read) must be in memory that a static step owns. There are two kinds:

- `CpuStaticDecodeStep` overwrites its places on the host with those of each later step. Its rows
  may be in any slots.
- `CudaStaticDecodeStep` computes places and masks on the device from the rows' lengths. Row i
  belongs to slot i, and attention reads the slots as a view. A row without a sequence is padding:
  it stores its keys and values in the spare place after the slots, which is never read, and sees
  the first token of slot i, whatever that holds. Its result stays in its own row and is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from deployments.compute.cpu.attention.slot_rows import SlotRows
from deployments.engine.attention.kv_slots import KVSlots
from deployments.engine.attention.packed_step import DecodePlaces, DecodeSpan, PackedStep
from deployments.engine.attention.varlen_reads import SlotReads
from deployments.engine.replay.graph_sizes import DecodeBucket


@dataclass(slots=True)
class StaticDecodeStep(PackedStep):
    """A packed step of decode rows only, one in each of the first slots, to capture."""

    @classmethod
    def _of_rows(cls, kv: KVSlots, num_rows: int, **fields: Any) -> Self:
        """Return a step in which row i is at the end of slot i.

        No sequence is longer, so calls that are sized by the rows' lengths are large enough.
        """
        slots, last = tuple(range(num_rows)), (kv.max_model_len - 1,) * num_rows
        return cls(kv, slots, last, (), **fields)


@dataclass(slots=True)
class CpuStaticDecodeStep(StaticDecodeStep):
    """A static step whose places are on the host; each later step's are copied over them."""

    @classmethod
    def of(cls, kv: KVSlots, num_rows: int) -> Self:
        """Return a step of `num_rows` rows."""
        step = cls._of_rows(kv, num_rows)
        for capacity in set(kv.capacities):
            step.decode_places(capacity)
        return step

    def take(self, step: PackedStep) -> None:
        """Overwrite the rows' places with those of another step of this size."""
        for capacity, places in self._decode_places.items():
            _slot_rows(places).places[:] = _slot_rows(step.decode_places(capacity)).places


def _slot_rows(places: DecodePlaces) -> SlotRows:
    assert places.rows is not None
    return places.rows


@dataclass(slots=True)
class CudaStaticDecodeStep(StaticDecodeStep):
    """A static step whose places are computed on the device, from one tensor of lengths.

    Attributes:
        lengths: [num_rows], int64, on the slots' device: tokens of each row's sequence, its own
            token included; 0 for padding.
        read_length: Tokens that each row reads from its slot.
        reads_by_length: Whether rows read their slots by `SlotReads` where possible.
    """

    lengths: torch.Tensor = field(kw_only=True)
    read_length: int = field(kw_only=True)
    reads_by_length: bool = field(default=False, kw_only=True)
    _stored_at: dict[int, torch.Tensor] = field(default_factory=dict, kw_only=True)
    _reads: dict[int, SlotReads] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(
        cls,
        kv: KVSlots,
        bucket: DecodeBucket,
        lengths: torch.Tensor,
        *,
        reads_by_length: bool = False,
    ) -> Self:
        """Return a step of the bucket's size."""
        return cls._of_rows(
            kv,
            bucket.num_rows,
            lengths=lengths,
            read_length=bucket.read_length,
            reads_by_length=reads_by_length,
        )

    @property
    def positions(self) -> torch.Tensor:
        """The position of each row's token: [num_rows], int64; 0 for padding."""
        return (self.lengths - 1).clamp_(min=0)

    def _place(self, capacity: int) -> DecodePlaces:
        return DecodePlaces(
            slots=torch.arange(self.num_decode, device=self.lengths.device),
            indices=self.positions % capacity,
        )

    def _split(self, capacity: int) -> Iterator[DecodeSpan]:
        """Yield one span of all rows, with a mask that is computed on the device."""
        rows, read_length = slice(0, self.num_decode), min(self.read_length, capacity)
        # A ring that has wrapped is shorter than its sequence, which sees all of the ring.
        seen = self.lengths.clamp(min=1)[:, None]
        mask = (torch.arange(read_length, device=seen.device) < seen)[:, None, None]
        yield DecodeSpan(rows, rows, read_length, mask)

    def decode_reads(self, capacity: int) -> SlotReads | None:
        """Return how far each row reads its slot, if rows read by length."""
        if not self.reads_by_length:
            return None
        if capacity not in self._reads:
            longest = min(self.read_length, capacity)
            self._reads[capacity] = SlotReads.of(self.lengths.clamp(min=1), capacity, longest)
        return self._reads[capacity]

    def store_decode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the rows' keys and values; padding goes to the spare place."""
        capacity = self.kv.capacities[layer]
        tokens = self._stored_at.get(capacity)
        if tokens is None:
            places = self.decode_places(capacity)
            tokens = places.slots * capacity + places.indices
            tokens.masked_fill_(self.lengths == 0, self.kv.num_slots * capacity)
            self._stored_at[capacity] = tokens
        self.kv.write_tokens(layer, tokens, keys, values)
