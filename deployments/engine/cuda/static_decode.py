"""A decode step of fixed size, whose rows are told by one tensor on the device.

What an ordinary packed step knows on the host (who writes where, who sees how much) is computed
here on the device, from the rows' lengths. So the same kernels, with the same arguments, serve each
step of this size: they can be captured.

Row i belongs to slot i, and attention reads the slots as a view. A row that no sequence has in this
step is padding. It stores its keys and values in the spare place behind the slots, which nobody
reads, and sees the first place of slot i, whatever stands there: what comes of it stays in its own
row, and is dropped.
"""

from dataclasses import dataclass, field

import torch

from deployments.engine.cuda.decode_buckets import DecodeBucket
from deployments.engine.cuda.slot_reads import SlotReads
from deployments.engine.kv_slots import KVSlots
from deployments.engine.packed_step import DecodePlaces, DecodeSpan, PackedStep


@dataclass(slots=True)
class StaticDecode(PackedStep):
    """A packed step of decode rows alone.

    Attributes:
        lengths: [num_rows], int64, on the slots' device: the tokens of each row's sequence, its own
            token included; 0 for padding.
        read_length: Places that the rows read.
        reads_by_length: Whether rows read their slots as `SlotReads` does, where that is possible.
    """

    lengths: torch.Tensor = field(kw_only=True)
    read_length: int = field(kw_only=True)
    reads_by_length: bool = field(default=False, kw_only=True)
    _stored_at: dict[int, torch.Tensor] = field(default_factory=dict, kw_only=True)
    _places: dict[int, DecodePlaces] = field(default_factory=dict, kw_only=True)
    _spans: dict[int, tuple[DecodeSpan, ...]] = field(default_factory=dict, kw_only=True)
    _reads: dict[int, SlotReads] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(
        cls,
        kv: KVSlots,
        bucket: DecodeBucket,
        lengths: torch.Tensor,
        *,
        reads_by_length: bool = False,
    ) -> "StaticDecode":
        """Return a step of this size."""
        num_rows = bucket.num_rows
        return cls(
            kv=kv,
            decode_slots=tuple(range(num_rows)),
            decode_positions=(0,) * num_rows,
            chunks=(),
            lengths=lengths,
            read_length=bucket.read_length,
            reads_by_length=reads_by_length,
        )

    @property
    def positions(self) -> torch.Tensor:
        """The position of each row's token: [num_rows], int64; 0 for padding."""
        return (self.lengths - 1).clamp_(min=0)

    def decode_places(self, capacity: int) -> DecodePlaces:
        """Return where the rows belong in layers of this capacity."""
        if capacity not in self._places:
            self._places[capacity] = DecodePlaces(
                slots=torch.arange(self.num_decode, device=self.lengths.device),
                indices=self.positions % capacity,
            )
        return self._places[capacity]

    def decode_spans(self, capacity: int) -> tuple[DecodeSpan, ...]:
        """Return one span of all rows, with a mask that is computed on the device."""
        if capacity not in self._spans:
            rows, read_length = slice(0, self.num_decode), min(self.read_length, capacity)
            # A ring that has come round is shorter than its sequence, which sees all of it.
            seen = self.lengths.clamp(min=1)[:, None]
            mask = (torch.arange(read_length, device=seen.device) < seen)[:, None, None]
            self._spans[capacity] = (DecodeSpan(rows, rows, read_length, mask),)
        return self._spans[capacity]

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
