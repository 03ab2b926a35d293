"""Attention of rows: the extents and lengths of a step's rows, and what a kernel does with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from deployments.compute.sdpa import Scores


@dataclass(frozen=True, slots=True)
class KVRows:
    """The extent, position and length of each row; layers of one capacity share them.

    Attributes:
        places: [3, m], int64: the first token of each row's extent; the index of the row's own
            token in the extent; the number of tokens at the start of the extent that the row sees.
        addresses: The addresses of the three rows of `places`.
        num_tokens: Tokens that all rows see, in total.
    """

    places: npt.NDArray[np.int64]
    addresses: tuple[int, int, int]
    num_tokens: int

    @classmethod
    def of(cls, starts: Sequence[int], indices: Sequence[int], lengths: Sequence[int]) -> "KVRows":
        """Return rows with these extents' starts, token indices and lengths, m of each."""
        places = np.array((starts, indices, lengths), np.int64)
        first, step = places.ctypes.data, places.strides[0]
        return cls(places, (first, first + step, first + 2 * step), sum(lengths))


class AttendRows(Protocol):
    """Stores each row's token in its extent, and attends with each row's query, in one kernel."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: KVRows,
        scores: Scores,
        *,
        in_order: bool = False,
    ) -> torch.Tensor:
        """Return [1, m, num_heads, head_dim].

        A row's result depends only on its query and on the tokens that it sees, to the last bit.

        Unless they run in order, rows do not wait for each other: if a row sees another row's
        token, that token must already be stored.

        Args:
            query: [1, num_heads, m, head_dim].
            key: [1, num_kv_heads, m, head_dim], of the rows' tokens, of the same dtype.
            value: As key.
            keys: [tokens of all extents, num_kv_heads, head_dim], contiguous, of the same dtype.
            values: As keys.
            rows: The extents and lengths of the rows.
            scores: How scores are computed.
            in_order: Whether each row is stored and has attended before the next one is stored,
                which takes a single thread.
        """
        ...
