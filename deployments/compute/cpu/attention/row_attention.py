"""Attention of rows on a CPU: one query per row, over the row's own extent and length.

torch's attention kernel is made for many queries of one sequence. It converts and packs the keys of
each head in every call, needs decode rows padded to the longest, and needs a call for each prefill
chunk. This kernel stores each row's token and reads exactly the tokens that the row sees, in place.
Their order does not matter, so a ring buffer is read like any other extent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from deployments.compute.cpu.attention.head_shape import HeadShape
from deployments.compute.cpu.jit.launch import KernelCall, bits_of, empty, launch
from deployments.compute.sdpa import Scores

if TYPE_CHECKING:
    from deployments.compute.cpu.attention.row_attention_kernel import RowAttentionKernel

PRODUCTS_PER_US = 16_000
"""Products of a query and a token's element that one thread computes in a microsecond."""

MIN_PARALLEL_PRODUCTS = 100_000
"""Number of products in a call above which waking a second thread pays: about 6 us on one thread.

Measured on two cores of a Zen 5: with 115,000 products a call took 13.4 to 13.8 us instead of 15.8,
with 57,000 products 13.0 us instead of 12.4."""


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


def can_attend_rows(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for such heads.

    There is none for other dtypes than bfloat16 and float32, or for heads that no vector divides.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    return HeadShape(head_dim, 1, 1, dtype is torch.bfloat16).lanes > 0


def attend_rows(
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
    """Store each row's token in its extent, and attend with each row's query, in one kernel.

    A row's result depends only on its query and on the tokens that it sees, to the last bit.

    Unless they run in order, rows do not wait for each other: if a row sees another row's token,
    that token must already be stored.

    Args:
        query: [1, num_heads, m, head_dim]; see `can_attend_rows`.
        key: [1, num_kv_heads, m, head_dim], of the rows' tokens, of the same dtype.
        value: As key.
        keys: [tokens of all extents, num_kv_heads, head_dim], contiguous, of the same dtype.
        values: As keys.
        rows: The extents and lengths of the rows.
        scores: How scores are computed.
        in_order: Whether each row is stored and has attended before the next one is stored, which
            takes a single thread.

    Returns:
        [1, m, num_heads, head_dim].
    """
    _, num_heads, num_rows, head_dim = query.shape
    has_sinks = scores.sinks is not None
    kernel = _make_kernel(head_dim, num_heads, keys.shape[1], query.dtype, has_sinks=has_sinks)
    shape = kernel.shape
    query, key, value = (_joined(tensor, head_dim) for tensor in (query, key, value))
    output = empty((1, num_rows, num_heads, head_dim), query.dtype)
    num_products = rows.num_tokens * num_heads * head_dim
    is_brief = num_products < MIN_PARALLEL_PRODUCTS
    num_threads = 1 if is_brief or in_order else torch.get_num_threads()
    # A row's heads are adjacent in memory, so they form one unit if there are enough rows.
    num_unit_heads = shape.num_kv_heads if num_rows >= num_threads else 1
    num_units = num_rows * (shape.num_kv_heads // num_unit_heads)
    arguments = kernel.make_arguments(
        query.data_ptr(),
        query.stride(2) * shape.itemsize,
        key.data_ptr(),
        key.stride(2) * shape.itemsize,
        value.data_ptr(),
        value.stride(2) * shape.itemsize,
        output.data_ptr(),
        num_heads * shape.head_bytes,
        keys.data_ptr(),
        values.data_ptr(),
        *rows.addresses,
        num_units,
        num_unit_heads,
        bits_of(head_dim**-0.5 if scores.scale is None else scores.scale),
        bits_of(scores.softcap or 0.0),
        0 if scores.sinks is None else scores.sinks.data_ptr(),
        0,
    )
    call = KernelCall(kernel.address, arguments)
    launch(call, min(num_threads, num_units), num_products / PRODUCTS_PER_US)
    return output


@cache
def _make_kernel(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, *, has_sinks: bool = False
) -> "RowAttentionKernel":
    # Imported here: it needs llvmlite, which a machine with a GPU may lack.
    from deployments.compute.cpu.attention.row_attention_kernel import RowAttentionKernel

    is_bfloat16 = dtype is torch.bfloat16
    shape = HeadShape(head_dim, num_heads, num_kv_heads, is_bfloat16, has_sinks)
    return RowAttentionKernel(shape)


def _joined(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return [1, heads, m, head_dim] with each row's heads contiguous; rows may have gaps."""
    _, head, _, element = rows.stride()
    if head == head_dim and element == 1:
        return rows
    return rows.transpose(1, 2).contiguous().transpose(1, 2)
