"""Reductions over blocks of a row, so that most of a long row is read only once.

A block is a slice of the vocabulary; the last one may be shorter than the others.
"""

from collections.abc import Callable

import torch

BLOCK = 256
"""Values in a block. Measured at 32 x 151,936 on a CPU: 128 to 1024 differ little, smaller blocks
are slower."""


def maxima_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each block of [n, length]: [n, blocks]."""
    return _reduce(values, lambda blocks: blocks.amax(dim=-1))


def sums_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block of [n, length]: [n, blocks], float64.

    Within a block the sum is float32: its error is no larger than that of the values, and a float64
    sum would first copy all of them.
    """
    return _reduce(values, lambda blocks: blocks.sum(dim=-1)).double()


def sums_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of [n, length], by blocks: [n], float64."""
    return sums_of_blocks(values).sum(dim=-1)


def places_in(blocks: torch.Tensor) -> torch.Tensor:
    """Return the places in blocks [n, b], including those past the end: [n, b * BLOCK]."""
    within = torch.arange(BLOCK, device=blocks.device)
    return (blocks[:, :, None] * BLOCK + within).flatten(1)


def _reduce(values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    num_rows, length = values.shape
    end = length // BLOCK * BLOCK
    whole = reduce(values[:, :end].reshape(num_rows, -1, BLOCK))
    if end == length:
        return whole
    return torch.cat([whole, reduce(values[:, None, end:])], dim=-1)
