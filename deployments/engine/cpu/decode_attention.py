"""Attention of decode rows on a CPU: one query for each row, over its own slot and length.

torch's kernel for attention is made for many queries. For one, it converts and packs the keys of
each head for every call, and rows of different lengths have to be padded to the longest. Here each
row reads exactly the tokens that its slot holds, once, and in place; their order does not matter,
so a ring is read as any other slot.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import numpy as np
import torch

from deployments.engine.cpu.decode_kernel import make_kernel
from deployments.engine.softcap import Scores

DTYPES = (torch.bfloat16, torch.float32)

MIN_PART = 2_000_000
"""Multiplications that are worth a thread of their own, which has to be woken for them."""


def can_attend(query: torch.Tensor) -> bool:
    """Return whether the kernel is made for such queries."""
    return query.device.type == "cpu" and query.dtype in DTYPES


def attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[int],
    lengths: Sequence[int],
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
    num_rows, num_heads, head_dim = query.shape
    kernel = make_kernel(head_dim, num_heads, keys.shape[2], query.dtype is torch.bfloat16)
    output = torch.empty_like(query)
    arguments = (
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        output.data_ptr(),
        np.array(slots),
        np.array(lengths),
        keys.stride(0),
        head_dim**-0.5 if scores.scale is None else scores.scale,
        scores.softcap or 0.0,
    )
    num_parts = min(
        torch.get_num_threads(), num_rows, 1 + sum(lengths) * num_heads * head_dim // MIN_PART
    )
    if num_parts == 1:
        kernel(0, num_rows, *arguments)
        return output
    bounds = _split(lengths, num_parts)
    threads = _threads(num_parts - 1)
    others = [
        threads.submit(kernel, bounds[i], bounds[i + 1], *arguments) for i in range(1, num_parts)
    ]
    kernel(bounds[0], bounds[1], *arguments)
    wait(others)
    return output


def _split(lengths: Sequence[int], num_parts: int) -> list[int]:
    """Return the bounds of parts of about as many tokens each."""
    ends = np.cumsum(lengths)
    inner = np.searchsorted(ends, [ends[-1] * i / num_parts for i in range(1, num_parts)])
    return [0, *(int(i) + 1 for i in inner), len(lengths)]


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="decode-attention")
