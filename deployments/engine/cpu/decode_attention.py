"""Attention of decode rows on a CPU: one query for each row, over its own slot and length.

torch's kernel for attention is made for many queries. For one, it converts and packs the keys of
each head for every call, and rows of different lengths have to be padded to the longest. Here each
row reads exactly the tokens that its slot holds, once, and in place; their order does not matter,
so a ring is read as any other slot.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from deployments.engine.cpu.decode_kernel import make_kernel
from deployments.engine.softcap import Scores

DTYPES = (torch.bfloat16, torch.float32)

MAX_THREADS = 2
"""The kernel runs on one thread, on which it is as fast as torch's is on two or three."""

MAX_PRODUCTS = 2_000_000
"""With more threads than those, the most products of a call that the kernel still gets: it is done
with them before torch's threads have come together."""


def can_attend(query: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Return whether the kernel is made for such queries, and likely faster than torch's own."""
    if query.device.type != "cpu" or query.dtype not in DTYPES:
        return False
    num_products = sum(lengths) * query[0].numel()
    return torch.get_num_threads() <= MAX_THREADS or num_products <= MAX_PRODUCTS


def attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[int] | npt.NDArray[np.int64],
    lengths: Sequence[int] | npt.NDArray[np.int64],
    scores: Scores,
) -> torch.Tensor:
    """Attend with one query per slot.

    Args:
        query: [m, num_heads, head_dim], bfloat16 or float32, on the CPU.
        keys: [num_slots, capacity, num_kv_heads, head_dim], contiguous, of the same type.
        values: As keys.
        slots: [m], the slot of each row.
        lengths: [m], how many tokens of its slot each row sees: the first so many.
        scores: How scores are made.

    Returns:
        [m, num_heads, head_dim].
    """
    query = query.contiguous()
    _, num_heads, head_dim = query.shape
    kernel = make_kernel(head_dim, num_heads, keys.shape[2], query.dtype is torch.bfloat16)
    output = torch.empty_like(query)
    kernel(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        output.data_ptr(),
        np.asarray(slots),
        np.asarray(lengths),
        keys.stride(0),
        head_dim**-0.5 if scores.scale is None else scores.scale,
        scores.softcap or 0.0,
    )
    return output
