"""A decode step of fixed size, captured once and replayed for every later step of that size.

Captured kernels always get the same arguments, so the values that change from step to step (where
rows write, how far they read) must be in memory that a static step owns. There are two kinds:

- `CpuStaticDecodeStep` overwrites its places on the host with those of each later step.
- `CudaStaticDecodeStep` computes places, and how far rows read, on the device from the rows'
  lengths and from where their extents start. A row without a sequence is padding: it stores its
  keys and values in the spare place after the blocks and reads that one token. Its result is
  dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from deployments.compute.speedups import KVRows
from deployments.engine.attention.decode_spans import MAX_GATHERED_BYTES, DecodeSpan
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import DecodePlaces, PackedStep
from deployments.engine.attention.step_reads import StepReads
from deployments.engine.attention.varlen_reads import ExtentReads
from deployments.plan.graph_sizes import DecodeBucket


@dataclass(slots=True)
class StaticDecodeStep(PackedStep):
    """A packed step of decode rows only, to capture."""

    @classmethod
    def _of_rows(cls, kv: KVCache, num_rows: int, **fields: Any) -> Self:
        """Return a step in which each row is the last of the longest sequence.

        So calls that are sized by the rows' lengths are large enough. Nothing is read or written
        where the rows say: each later step says where.
        """
        starts, last = ((0,) * kv.num_groups,) * num_rows, (kv.max_model_len - 1,) * num_rows
        return cls(kv, starts, last, (), **fields)


@dataclass(slots=True)
class CpuStaticDecodeStep(StaticDecodeStep):
    """A static step whose places are on the host; each later step's are copied over them."""

    @classmethod
    def of(cls, kv: KVCache, num_rows: int) -> Self:
        """Return a step of `num_rows` rows."""
        step = cls._of_rows(kv, num_rows)
        for capacity in kv.layout.capacities:
            step.decode_places(capacity)
        return step

    def take(self, step: PackedStep) -> None:
        """Overwrite the rows' places with those of another step of this size."""
        for capacity, places in self._decode_places.items():
            _kv_rows(places).places[:] = _kv_rows(step.decode_places(capacity)).places


def _kv_rows(places: DecodePlaces) -> KVRows:
    assert places.rows is not None
    return places.rows


@dataclass(slots=True)
class CudaStaticDecodeStep(StaticDecodeStep):
    """A static step whose places are computed on the device, from two tensors.

    Attributes:
        lengths: [num_rows], int64, on the KV cache's device: tokens of each row's sequence, its own
            token included; 0 for padding.
        starts: [num_groups, num_rows], int64, likewise: the first token of each row's extent; the
            spare one for padding.
        read_length: The most tokens that a row reads from its extent.
    """

    lengths: torch.Tensor = field(kw_only=True)
    starts: torch.Tensor = field(kw_only=True)
    read_length: int = field(kw_only=True)

    @classmethod
    def of(
        cls,
        kv: KVCache,
        bucket: DecodeBucket,
        lengths: torch.Tensor,
        starts: torch.Tensor,
    ) -> Self:
        """Return a step of the bucket's size."""
        return cls._of_rows(
            kv,
            bucket.num_rows,
            lengths=lengths,
            starts=starts,
            read_length=bucket.read_length,
        )

    @property
    def positions(self) -> torch.Tensor:
        """The position of each row's token: [num_rows], int64; 0 for padding."""
        return (self.lengths - 1).clamp_(min=0)

    def _place(self, capacity: int) -> DecodePlaces:
        return DecodePlaces(self._starts(capacity) + self.positions % capacity)

    def _starts(self, capacity: int) -> torch.Tensor:
        return self.starts[self.kv.group_of(capacity)]

    def _split(self, capacity: int) -> Iterator[DecodeSpan]:
        """Yield spans of as many rows as may be gathered, padded to the step's size."""
        read_length = min(self.read_length, capacity)
        starts, lengths = self._starts(capacity), self.lengths.clamp(min=1)
        row_bytes = read_length * self.kv.shape.bytes_per_layer_token
        num_at_once = max(1, MAX_GATHERED_BYTES // row_bytes)
        for first in range(0, self.num_decode, num_at_once):
            rows = slice(first, min(first + num_at_once, self.num_decode))
            yield DecodeSpan.gathered(rows, starts[rows], lengths[rows], read_length)

    def reads(self, capacity: int) -> StepReads:
        """Return what the rows store and read in layers of this capacity, by lengths."""
        if capacity not in self._reads:
            decode = ExtentReads.of_rows(
                self._starts(capacity),
                self.lengths.clamp(min=1),
                self.kv.spare_tokens[self.kv.group_of(capacity)],
                min(self.read_length, capacity),
                self.kv.attend_rows,
            )
            self._reads[capacity] = StepReads(self.decode_places(capacity).tokens, decode)
        return self._reads[capacity]
