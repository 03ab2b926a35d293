"""Splits the decode rows of a step into calls of torch's attention.

A row by itself reads its extent as a view, exactly as far as its sequence goes. Several rows can
only share a call if their tokens are first gathered, each padded to the longest. So rows share a
call if gathering and padding cost less than the calls that they save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

CALL_COST_BYTES = {"cpu": 128 * 1024, "cuda": 32 * 2**20}
"""Bytes of keys and values that could be read in the time one more call takes, by device type.
Source: on a CPU, one thread, bfloat16: 30 us for a call with its overhead, 4.5 GB/s from memory.
On a GPU: a launch of about 10 us at 3 TB/s, calculated and not measured."""

GATHER_COST = 3
"""Times that a gathered token is read or written: it is read, written, and read again. Calculated
and not measured."""

MAX_GATHERED_BYTES = 64 * 2**20
"""Most keys and values of a layer that are gathered for one call."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows `first` .. `end`-1, which all read the same number of tokens."""

    first: int
    end: int
    read_length: int

    @property
    def num_read_tokens(self) -> int:
        """Tokens that the span's rows read in total."""
        return (self.end - self.first) * self.read_length

    @property
    def cost(self) -> int:
        """Cost of the span's reads, in tokens read."""
        return self.num_read_tokens * (GATHER_COST if self.end - self.first > 1 else 1)


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Decode rows that attend in one call.

    Attributes:
        rows: The rows, m of them.
        tokens: The places of the tokens that they read: a slice if there is one row, which reads
            its extent as a view; [m, t], int64, if they are gathered.
        mask: [m, 1, 1, t], bool: which of them each row sees; None if every row sees all.
    """

    rows: slice
    tokens: slice | torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def gathered(
        cls,
        rows: slice,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        read_length: int,
        *,
        is_padded: bool = True,
    ) -> Self:
        """Return a span whose rows are padded to `read_length` tokens, by repeating their last.

        Args:
            rows: The rows.
            starts: [m], int64, the first token of each row's extent.
            lengths: [m], int64, how many tokens each row sees; at least 1.
            read_length: Tokens that each row reads.
            is_padded: Whether any row may see fewer.
        """
        places, own = torch.arange(read_length, device=starts.device), lengths[:, None]
        tokens = starts[:, None] + torch.minimum(places, own - 1)
        return cls(rows, tokens, (places < own)[:, None, None] if is_padded else None)

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what the rows read of a layer's keys or values: [m, num_kv_heads, t, head_dim]."""
        num_rows = self.rows.stop - self.rows.start
        return stored[self.tokens].view(num_rows, -1, *stored.shape[1:]).transpose(1, 2)


def split_rows(lengths: Sequence[int], call_cost: float, max_gathered: float) -> list[RowSpan]:
    """Split rows into spans: one greedy pass that starts a new span unless sharing is cheaper.

    A single call for all rows is used instead if it is cheaper.

    Args:
        lengths: Tokens that each row must read.
        call_cost: Cost of a call, in tokens read.
        max_gathered: The most tokens that several rows together may read in a call.
    """
    spans: list[RowSpan] = []
    for row, length in enumerate(lengths):
        if spans:
            last = spans[-1]
            extended = RowSpan(last.first, row + 1, max(last.read_length, length))
            is_cheaper = extended.cost <= last.cost + call_cost + length
            if is_cheaper and extended.num_read_tokens <= max_gathered:
                spans[-1] = extended
                continue
        spans.append(RowSpan(row, row + 1, length))
    return _single_if_cheaper(spans, call_cost, max_gathered)


def _single_if_cheaper(
    spans: list[RowSpan], call_cost: float, max_gathered: float
) -> list[RowSpan]:
    if len(spans) < 2:
        return spans
    whole = RowSpan(0, spans[-1].end, max(span.read_length for span in spans))
    split_cost = sum(call_cost + span.cost for span in spans)
    is_cheaper = call_cost + whole.cost < split_cost
    return [whole] if is_cheaper and whole.num_read_tokens <= max_gathered else spans
