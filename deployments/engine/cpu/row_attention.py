"""Attention of rows on a CPU: one query for each row, over its own slot and length.

torch's kernel for attention is made for many queries of one sequence. It converts and packs the
keys of each head for every call; decode rows of different lengths have to be padded to the longest,
and each prefill chunk is a call of its own. Here each row stores its token and reads exactly what
it sees of its slot, in place; the order there does not matter, so a ring is read as any other slot.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from deployments.engine.cpu.launch import KernelCall, empty, launch
from deployments.engine.softcap import Scores

if TYPE_CHECKING:
    from deployments.engine.cpu.row_kernel import RowKernel

MIN_PARALLEL_PRODUCTS = 100_000
"""Products of a call from which on a second thread is worth waking: about 6 us of one. Measured on
two cores of a Zen 5: with 115,000 a call took 13.4 to 13.8 us instead of 15.8, with 57,000 13.0
instead of 12.4."""

MIN_PREFILL_GROUP = {torch.bfloat16: 2, torch.float32: 4}
"""Queries that have to share a key for this kernel to prefill faster than torch's, which packs keys
once for many queries. Measured on two cores of a Zen 5, for chunks of 64 to 512 tokens behind up to
3500: 1.3 to 3.3 and 0.65 to 2.5 times as fast from there on, 0.5 to 1.3 and 0.2 to 1.3 below."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Where rows stand, as the kernel reads it; layers of one capacity share it.

    Attributes:
        places: [3, m], int64: the slot of each row; the place of its token in the slot; how many
            tokens of its slot it sees, the first so many.
        addresses: Of the three.
        num_tokens: That all rows see together.
    """

    places: npt.NDArray[np.int64]
    addresses: tuple[int, int, int]
    num_tokens: int

    @classmethod
    def of(cls, slots: Sequence[int], indices: Sequence[int], lengths: Sequence[int]) -> "SlotRows":
        """Write down the rows' slots, their tokens' places and lengths, m of each."""
        places = np.array((slots, indices, lengths), np.int64)
        first, step = places.ctypes.data, places.strides[0]
        return cls(places, (first, first + step, first + 2 * step), sum(lengths))


def can_attend(query: torch.Tensor, num_kv_heads: int) -> bool:
    """Return whether there is a kernel for such queries, [1, num_heads, m, head_dim].

    There is none on other devices, for other types, and for heads that no vector divides.
    """
    return query.is_cpu and _find_kernel(query, num_kv_heads) is not None


def can_prefill(query: torch.Tensor, num_kv_heads: int) -> bool:
    """Return whether the kernel takes such queries, and the rows of chunks sooner than torch."""
    least = MIN_PREFILL_GROUP.get(query.dtype)
    is_grouped = least is not None and query.shape[1] >= least * num_kv_heads
    return is_grouped and can_attend(query, num_kv_heads)


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: SlotRows,
    scores: Scores,
) -> torch.Tensor:
    """Store each row's token, and attend with each row's query.

    A row does not wait for another's token: where it sees it, the token must stand there already.

    Args:
        query: [1, num_heads, m, head_dim], such that `can_attend`.
        key: [1, num_kv_heads, m, head_dim], of the rows' tokens, of the same type.
        value: As key.
        keys: [num_slots, capacity, num_kv_heads, head_dim], contiguous, of the same type.
        values: As keys.
        rows: Where the rows stand.
        scores: How scores are made.

    Returns:
        [1, m, num_heads, head_dim].
    """
    _, num_heads, num_rows, head_dim = query.shape
    kernel = _find_kernel(query, keys.shape[2])
    assert kernel is not None
    shape = kernel.shape
    query, key, value = (_joined(tensor, head_dim) for tensor in (query, key, value))
    output = empty((1, num_rows, num_heads, head_dim), query.dtype)
    is_brief = rows.num_tokens * num_heads * head_dim < MIN_PARALLEL_PRODUCTS
    num_threads = 1 if is_brief else torch.get_num_threads()
    # A row's heads lie beside each other in memory, and stay together where rows are enough.
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
        keys.stride(0) * shape.itemsize,
        *rows.addresses,
        num_units,
        num_unit_heads,
        _bits(head_dim**-0.5 if scores.scale is None else scores.scale),
        _bits(scores.softcap or 0.0),
        0,
    )
    call = KernelCall(kernel.address, arguments)
    launch(call, 0 if is_brief else min(num_threads, num_units))
    return output


def _find_kernel(query: torch.Tensor, num_kv_heads: int) -> "RowKernel | None":
    _, num_heads, _, head_dim = query.shape
    return _make_kernel(head_dim, num_heads, num_kv_heads, query.dtype)


@cache
def _make_kernel(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> "RowKernel | None":
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    # Only here: these need llvmlite, which a machine that computes on a GPU may lack.
    from deployments.engine.cpu.head_shape import HeadShape
    from deployments.engine.cpu.row_kernel import RowKernel

    shape = HeadShape(head_dim, num_heads, num_kv_heads, dtype is torch.bfloat16)
    return RowKernel(shape) if shape.lanes else None


def _joined(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return [1, heads, m, head_dim] with the heads of a row side by side; rows may be apart."""
    _, head, _, element = rows.stride()
    if head == head_dim and element == 1:
        return rows
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    assert isinstance(bits, int)
    return bits
