"""Attention of decode rows on a GPU: each reads the keys and values of its own extent once.

Flash attention gives each sequence and head of keys to one processor, unless there are few, and
waits for one block of tokens after the other: with tens of sequences most of the memory's bandwidth
is unused. Here the extents are divided into so many parts that every processor has several at once.
A second kernel adds the parts up.

Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import torch
import triton

from deployments.compute.gpu.kernels import add_parts, attend_part
from deployments.compute.gpu.launch import on_its_gpu

BLOCK_BYTES = 16_384
"""Keys, or values, that a program reads at a time."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that each of the GPU's processors gets, if there are few rows. With one, extents of the
same length are read a little faster, but a long one among short ones would be read alone."""

MAX_PARTS = 64
"""Parts of an extent. Their sums are added by one program."""

LEAST_SIDE = 16
"""Rows, columns and terms of the smallest product of matrices that a GPU computes at once."""

LOG2_E = 1.4426950408889634


@on_its_gpu
def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Attend with one query of each sequence to all its tokens.

    Args:
        query: [n, num_heads, head_dim], bfloat16 or float16.
        keys: [tokens, num_kv_heads, head_dim]; a token's heads lie one after the other.
        values: As keys.
        starts: [n], int32, the first token of each sequence.
        lengths: [n], int32, how many tokens each sequence has, at least 1.
        longest: The most tokens that a sequence can have.
        scale: Factor on the scores; None means head_dim ** -0.5.

    Returns:
        [n, num_heads, head_dim].
    """
    query = query.contiguous()
    num_rows, num_heads, width = query.shape
    num_kv_heads, block_width = keys.shape[1], max(LEAST_SIDE, triton.next_power_of_2(width))
    group = num_heads // num_kv_heads
    block_tokens = BLOCK_BYTES // (block_width * keys.element_size())
    num_parts = _num_parts(query.device, num_rows * num_kv_heads, longest, block_tokens)
    output = torch.empty_like(query)
    most_scores = totals = sums = output
    if num_parts > 1:
        size = (num_rows, num_heads, num_parts)
        sums = query.new_empty(*size, width, dtype=torch.float32)
        most_scores, totals = (query.new_empty(size, dtype=torch.float32) for _ in range(2))
    attend_part[(num_rows, num_kv_heads, num_parts)](
        query,
        keys,
        values,
        starts,
        lengths,
        sums,
        most_scores,
        totals,
        (width**-0.5 if scale is None else scale) * LOG2_E,
        num_parts,
        query.stride(0),
        keys.stride(0),
        values.stride(0),
        group=group,
        width=width,
        block_group=max(LEAST_SIDE, triton.next_power_of_2(group)),
        block_width=block_width,
        block_tokens=block_tokens,
        is_whole=num_parts == 1,
        is_wide=longest * max(keys.stride(0), values.stride(0)) >= 2**31,
        num_warps=4,
        num_stages=3,
    )
    if num_parts > 1:
        add_parts[(num_rows * num_heads,)](
            sums,
            most_scores,
            totals,
            output,
            num_parts,
            width=width,
            block_parts=triton.next_power_of_2(num_parts),
            block_width=block_width,
            num_warps=4,
        )
    return output


def _num_parts(device: torch.device, num_extents: int, longest: int, block_tokens: int) -> int:
    """Return into how many parts each extent is divided."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors, num_extents)
    return max(1, min(int(wanted), MAX_PARTS, -(-longest // block_tokens)))
