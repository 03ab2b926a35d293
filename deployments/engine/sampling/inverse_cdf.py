"""Draws one of many entries by a random number, with the inverse of the cumulative distribution.

Entries keep their own order and are not sorted by weight. Two entries of nearly equal weight could
be sorted differently in another batch, and the same number would then draw another entry.

A cumulative sum over the whole vocabulary in float64 would take longer than everything else. So
weights are summed by blocks, and only the block in which the number falls is searched.
"""

import torch

from deployments.engine.sampling.block_reductions import BLOCK, places_in, sums_of_blocks

_BELOW_ONE = 1 - 2.0**-53


def inverse_cdf(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return which entry each number draws.

    Args:
        weights: [m, c], float32, not negative, with at least one above 0 in each row.
        numbers: [m], float64, in [0, 1), on the same device.

    Returns:
        [m], int64: for each row, the first entry at which the cumulative weight exceeds number *
        total weight. Its weight is never 0.
    """
    length = weights.shape[-1]
    if length <= BLOCK:
        return _first_above(weights, numbers * weights.sum(dim=-1, dtype=torch.float64))
    sums = sums_of_blocks(weights)
    goals = numbers * sums.sum(dim=-1)
    blocks = _first_above(sums, goals)[:, None]
    before = (sums.cumsum(dim=-1) - sums).gather(-1, blocks)[:, 0]
    places = places_in(blocks)
    within = weights.gather(-1, places.clamp(max=length - 1)).masked_fill_(places >= length, 0.0)
    return blocks[:, 0] * BLOCK + _first_above(within, goals - before)


def _first_above(weights: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Sums by blocks may differ in the last digits; the goal must stay below this total.
    goals = torch.minimum(goals.clamp(min=0.0), cumulative[:, -1] * _BELOW_ONE)
    # `right` finds the first sum above the goal, which is never at an entry of weight 0.
    return torch.searchsorted(cumulative, goals[:, None], right=True)[:, 0]
