"""Drawing one of many by a random number: the inverse of a cumulative distribution.

The order is that of the entries, not of their sizes: two entries of nearly equal weight may swap
places in a sorted order from one batch to another, and then the same number draws another.

The cumulative sum of a whole vocabulary, in the precision that this needs, takes longer than all
else. So weights are summed by blocks, and only the block in which the number falls is looked into.
"""

import torch

from deployments.engine.blocks import BLOCK, places_in, sums_of_blocks

_BELOW_ONE = 1 - 2.0**-53


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return which entry each number draws.

    Args:
        weights: [m, c], float32, none negative and at least one in each row above 0.
        numbers: [m], float64, from 0 up to but not 1, on the same device.

    Returns:
        [m], int64: the first entries up to which the weights sum to more than the number's part of
        their sum. None of them has a weight of 0.
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
    # Sums made in another way may differ in the last digits; the goal must stay below this one.
    goals = torch.minimum(goals.clamp(min=0.0), cumulative[:, -1] * _BELOW_ONE)
    # `right` finds the first sum above the goal, so an entry of weight 0 is never it.
    return torch.searchsorted(cumulative, goals[:, None], right=True)[:, 0]
