"""KV caches full of NaN, in which extents are as short as possible, out of order and apart.

So whatever reads a token that is not its sequence's own gives NaN.
"""

from collections.abc import Sequence
from random import Random

import torch

from deployments.compute.cpu.attention.row_attention import can_attend_rows
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.step_reads import Starts
from deployments.plan.kv_layout import KVLayout


def make_cache(
    shape: KVShape,
    lengths: Sequence[int],
    *,
    max_model_len: int,
    block_size: int = 8,
    reads_by_length: bool = False,
) -> tuple[KVCache, list[Starts]]:
    """Return a cache on the CPU and extents for sequences of these lengths.

    Its kernel attends unless rows read by length.
    """
    capacities = shape.group_capacities(max_model_len)
    needed = [KVLayout(capacities, (), block_size).blocks_for(length) for length in lengths]
    starts = [[0] * len(capacities) for _ in lengths]
    num_blocks = []
    for group in range(len(capacities)):
        first = 1
        for i in Random(group).sample(range(len(lengths)), len(lengths)):
            starts[i][group] = first * block_size
            first += needed[i][group] + 1
        num_blocks.append(first)
    layout = KVLayout(capacities, tuple(num_blocks), block_size)
    kv = KVCache(
        shape,
        layout,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
        attends_in_place=not reads_by_length and can_attend_rows(shape.head_dim, shape.dtype),
        reads_by_length=reads_by_length,
    )
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(torch.nan)
    return kv, [tuple(own) for own in starts]
