"""Attention of decode rows on a CPU: one query for each row, over its own slot and length.

torch's kernel for attention is made for many queries. For one, it converts and packs the keys of
each head for every call, and rows of different lengths have to be padded to the longest. Here each
row stores its newest token and reads exactly the tokens that its slot holds, once, and in place;
their order does not matter, so a ring is read as any other slot.
"""

import ctypes
import struct

import numpy as np
import numpy.typing as npt
import torch

from deployments.engine.cpu.decode_kernel import ARGUMENTS, HeadShape, make_kernel
from deployments.engine.cpu.openmp import find_parallel, run_alone
from deployments.engine.softcap import Scores

DTYPES = (torch.bfloat16, torch.float32)

MIN_PARALLEL_PRODUCTS = 200_000
"""Products of a call from which on a second thread is worth waking: about 10 us of one."""

IntArray = npt.NDArray[np.int64]
Arguments = ctypes.c_int64 * len(ARGUMENTS)


def can_attend(query: torch.Tensor, num_kv_heads: int) -> bool:
    """Return whether there is a kernel for such queries, [m, num_heads, head_dim]."""
    return (
        query.device.type == "cpu"
        and query.dtype in DTYPES
        and bool(_head_shape(query, num_kv_heads).lanes)
    )


def attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: IntArray,
    indices: IntArray,
    lengths: IntArray,
    scores: Scores,
) -> torch.Tensor:
    """Store a token in each slot, and attend with one query per slot.

    Args:
        query: [m, num_heads, head_dim], bfloat16 or float32, on the CPU.
        key: [m, num_kv_heads, head_dim], of the new tokens, of the same type.
        value: As key.
        keys: [num_slots, capacity, num_kv_heads, head_dim], contiguous, of the same type.
        values: As keys.
        slots: [m], the slot of each row, no two the same.
        indices: [m], the place of each row's new token in its slot.
        lengths: [m], how many tokens of its slot each row sees: the first so many.
        scores: How scores are made.

    Returns:
        [m, num_heads, head_dim].
    """
    query, key, value = (_joined(rows) for rows in (query, key, value))
    shape = _head_shape(query, keys.shape[2])
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_products = int(lengths.sum()) * query[0].numel()
    num_threads = torch.get_num_threads() if num_products >= MIN_PARALLEL_PRODUCTS else 1
    # A row's heads lie beside each other in memory, and stay together where rows are enough.
    num_heads = shape.num_kv_heads if len(query) >= num_threads else 1
    num_units = len(query) * (shape.num_kv_heads // num_heads)
    arguments = Arguments(
        *_place(query),
        *_place(key),
        *_place(value),
        *_place(output),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) * shape.itemsize,
        slots.ctypes.data,
        indices.ctypes.data,
        lengths.ctypes.data,
        num_units,
        num_heads,
        _bits(shape.head_dim**-0.5 if scores.scale is None else scores.scale),
        _bits(scores.softcap or 0.0),
        0,
    )
    run = find_parallel() or run_alone
    run(make_kernel(shape).address, arguments, min(num_threads, num_units), 0)
    return output


def _head_shape(query: torch.Tensor, num_kv_heads: int) -> HeadShape:
    _, num_heads, head_dim = query.shape
    return HeadShape(head_dim, num_heads, num_kv_heads, query.dtype is torch.bfloat16)


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """Return [m, heads, head_dim] with the heads of a row side by side; the rows may be apart."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _place(rows: torch.Tensor) -> tuple[int, int]:
    return rows.data_ptr(), rows.stride(0) * rows.itemsize


def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    assert isinstance(bits, int)
    return bits
